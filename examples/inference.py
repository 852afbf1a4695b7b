"""Run a Keras model over a stream of scanned pages, each with another number of handwritten digits.

A page is a batch: it goes to the first idle device as it is, and its answers come back in the order of the pages, in
memory bounded by what is in flight. The same stream as a `tf.data.Dataset` feeds Keras again. See also `--help`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import devicemap
from devicemap.types import ChunkFinished, Event

try:
    import matplotlib
    import rich.table
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scikit-learn matplotlib rich") from error

FOR_TRAINING = 1000
MOST_ON_A_PAGE = 60
BLUE, ORANGE = "#0072b2", "#d55e00"
TOLERANCE = 1e-4  # probabilities; a convolution of another batch size may round differently


def load() -> tuple[np.ndarray, np.ndarray]:
    """All 1797 images, float32 `[1797, 8, 8, 1]` from 0 to 1, and their digits `[1797]`, shuffled."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order].reshape(-1, 8, 8, 1) / 16).astype("f"), digits[order]


def train(images: np.ndarray, digits: np.ndarray, epochs: int) -> tf.keras.Model:
    """A small convolutional network, with batch normalisation and dropout, which do nothing to the answers later."""
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input([8, 8, 1]),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images, digits, batch_size=50, epochs=epochs, verbose=0)
    return model


def scan(images: np.ndarray, digits: np.ndarray, pages: int) -> tf.data.Dataset:
    """`pages` pages: batches of 1 to 60 `(images, digits)`, which go round and round in what there is."""

    def turn() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng, start = np.random.default_rng(1), 0
        for count in rng.integers(1, MOST_ON_A_PAGE, pages, endpoint=True):
            rows = np.arange(start, start + count) % len(images)
            start += count
            yield images[rows], digits[rows]

    specs = tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(turn, output_signature=specs)


class Shares:
    """Count the rows of each device: an observer of every chunk, for the option `progress`."""

    def __init__(self) -> None:
        self.pages: Counter[str] = Counter()
        self.images: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, ChunkFinished):
            self.pages[event.shard.device] += 1
            self.images[event.shard.device] += len(event.shard)

    def show(self, title: str) -> None:
        """Print a row for each device."""
        table = rich.table.Table("device", title=title)
        table.add_column("pages", justify="right")
        table.add_column("images", justify="right")
        for device in sorted(self.pages):
            table.add_row(device.rpartition("device:")[2], f"{self.pages[device]}", f"{self.images[device]}")
        rich.print(table)


def draw(images: np.ndarray, digits: np.ndarray, chances: np.ndarray, file: Path) -> None:
    """Draw a confusion matrix, and the images `[rows, 8, 8, 1]` whose `chances` `[rows, 10]` are furthest from right."""
    guesses = chances.argmax(-1)
    matplotlib.rcParams["font.size"] = 13  # legible at half size
    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    figure.suptitle("A Keras model over a stream of pages", weight="bold")
    left, right = figure.subfigures(1, 2)
    counts = np.zeros([10, 10], int)
    np.add.at(counts, (digits, guesses), 1)
    matrix = left.subplots()
    matrix.imshow(np.log1p(counts), cmap="Greens")
    for (digit, guess), count in np.ndenumerate(counts):
        if count:
            matrix.text(guess, digit, count, ha="center", va="center", color="white" if digit == guess else ORANGE)
    matrix.set(xticks=range(10), yticks=range(10), xlabel="answer", ylabel="digit", title="Images, by digit and answer")
    right.suptitle("Least sure of the right answer")
    worst = np.argsort(chances[np.arange(len(digits)), digits])[:10]
    cells = right.subplots(2, 5).ravel()
    for cell in cells:
        cell.axis("off")
    for cell, row in zip(cells, worst):
        cell.imshow(images[row, :, :, 0], cmap="gray_r")
        colour = BLUE if guesses[row] == digits[row] else ORANGE
        cell.set_title(
            f"is {digits[row]}: {chances[row, digits[row]]:.0%}\nanswer {guesses[row]}", color=colour, size=12
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, train, stream, check against the model itself, print and draw."""
    parser = argparse.ArgumentParser(description="A Keras model over a stream of pages of handwritten digits.")
    parser.add_argument("--pages", type=int, default=200, metavar="N", help="pages to read (200)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="epochs to train for (8)")
    parser.add_argument("--simulate", type=int, metavar="N", help="cut the CPU into N devices first")
    parser.add_argument("--output", type=Path, default=Path("output/inference.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.pages < 1 or flags.epochs < 1:
        raise SystemExit(f"--pages {flags.pages} --epochs {flags.epochs}; expected at least 1 of each")
    if flags.simulate is not None:
        devicemap.simulate_devices(flags.simulate)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # or GPUs round to three digits
    images, digits = load()
    model = train(images[:FOR_TRAINING], digits[:FOR_TRAINING], flags.epochs)
    pages = scan(images[FOR_TRAINING:], digits[FOR_TRAINING:], flags.pages)

    shares = Shares()
    reader = devicemap.DeviceMap(
        lambda images, digits: (model(images, training=False), digits),  # what belongs to a row goes with it
        batched=True,
        progress=shares,
        name="reader",
    )
    start, right, rows = time.perf_counter(), 0, 0
    answers = []
    for chances, truth in reader.stream(pages):  # a page at a time, in order
        right += int(np.sum(chances.numpy().argmax(-1) == truth.numpy()))
        rows += len(truth)
        answers.append(chances.numpy())
    seconds = time.perf_counter() - start
    shares.show(f"{flags.pages} pages of digits")

    worst = 0.0
    for answer, (batch, _) in zip(answers, pages, strict=True):
        wanted = model(batch, training=False).numpy()
        assert answer.shape == wanted.shape
        worst = max(worst, float(np.max(np.abs(answer - wanted))))
    assert worst < TOLERANCE, f"the stream differs from the model by {worst:.1g}"
    metric = tf.keras.metrics.SparseCategoricalAccuracy()
    for chances, truth in reader.as_dataset(pages).prefetch(2):  # the same stream, for whatever takes a dataset
        metric.update_state(truth, chances)
    assert round(float(metric.result()) * rows) == right

    chances = np.concatenate(answers)
    seen = np.arange(min(rows, len(images) - FOR_TRAINING))  # pages repeat when all images have been on one
    draw(images[FOR_TRAINING:][seen], digits[FOR_TRAINING:][seen], chances[seen], flags.output)
    print(f"Right: {right / rows:.1%} of {rows} images, at {rows / seconds:,.0f} images/s from the first page on.")
    print(
        f"The answers are the model's own, page by page; the largest difference is {worst:.1g}. Picture: {flags.output}"
    )


if __name__ == "__main__":
    main()
