"""Turn a folder of images into a Parquet dataset of features, with Ray Data and `devicemap.ray`, and look for what is alike.

Pieces of two photographs, no two of one size, are written as PNG files. Actors, here on a Ray cluster of this machine alone,
decode them and compute features. Nothing but the address given to `ray.init` is
another on a cluster of many hosts. See also `--help`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

try:
    import matplotlib
    import ray
    import ray.data
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
    from sklearn.datasets import load_sample_images
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install 'ray[data]' scikit-learn matplotlib") from error

import devicemap.ray

SMALL = 48  # pixels of a thumbnail's side
TONES = 8  # of each colour, in the histogram
QUERIES, ALIKE = 3, 4
TOLERANCE = 1e-5


def cut(count: int, folder: Path) -> None:
    """Write `count` pieces of two photographs, of 40 to 160 pixels a side, as `china-007-….png` or `flower-008-….png`."""
    rng = np.random.default_rng(0)
    photographs = dict(zip(("china", "flower"), load_sample_images().images))
    for number in range(count):
        name = [*photographs][number % 2]
        photograph = photographs[name]
        height, width = rng.integers(40, 160, 2, endpoint=True)
        top, left = rng.integers(0, np.array(photograph.shape[:2]) - (height, width))
        piece = tf.io.encode_png(photograph[top : top + height, left : left + width])
        tf.io.write_file(str(folder / f"{name}-{number:03}.png"), piece)


def describe(row: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """One file, its `bytes` and its `path` -> thumbnail, share of each tone of red, green and blue, and strength of edges."""
    image = tf.image.convert_image_dtype(tf.io.decode_png(row["bytes"], channels=3), tf.float32)
    tones = tf.one_hot(tf.cast(tf.minimum(image, 0.999) * TONES, tf.int32), TONES)
    edges = tf.image.sobel_edges(image[None])[0]
    thumbnail = tf.image.resize(image, [SMALL, SMALL], antialias=True)
    return {
        "path": row["path"],
        "size": tf.shape(image)[:2],
        "thumbnail": tf.image.convert_image_dtype(thumbnail, tf.uint8, saturate=True),
        "tones": tf.reduce_mean(tones, [0, 1]),
        "edges": tf.reduce_mean(tf.norm(edges, axis=-1), [0, 1]),
    }


def draw(rows: list[dict[str, Any]], file: Path) -> float:
    """Draw images with those that are most alike; returns how many of these are of the same photograph."""
    features = np.array([[*np.ravel(row["tones"]), *row["edges"]] for row in rows])
    photographs = np.array([Path(row["path"]).name.partition("-")[0] for row in rows])
    distances = np.abs(features[:, None] - features[None]).sum(-1)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, : 1 + ALIKE]
    matplotlib.rcParams["font.size"] = 13  # legible at half size
    figure = Figure(figsize=(8, 5), dpi=80, layout="constrained")
    figure.suptitle("Pieces of photographs, and those most like them", weight="bold")
    cells = figure.subplots(QUERIES, 1 + ALIKE, squeeze=False)
    for cell in cells.ravel():
        cell.axis("off")
    for line, query in zip(cells, np.linspace(0, len(rows) - 1, QUERIES).astype(int)):
        for cell, found in zip(line, nearest[query]):
            height, width = rows[found]["size"]
            cell.imshow(np.asarray(rows[found]["thumbnail"]), aspect=height / width, interpolation="nearest")
            cell.set_title(f"{width} x {height}" if found != query else "like this", size=13)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    return float(np.mean(photographs[nearest[:, 1:]] == photographs[:, None]))


def main() -> None:
    """Read the flags, write images, describe them on all actors, read Parquet, check, print and draw."""
    parser = argparse.ArgumentParser(description="A folder of images to Parquet, with Ray Data.")
    parser.add_argument("--images", type=int, default=400, metavar="N", help="images to write (400)")
    parser.add_argument("--actors", type=int, default=2, metavar="N", help="processes that compute (2)")
    parser.add_argument("--output", type=Path, default=Path("output/images.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.images <= ALIKE or flags.actors < 1:
        raise SystemExit(f"--images {flags.images} --actors {flags.actors}; expected over {ALIKE} images and an actor")
    ray.init("local", num_cpus=flags.actors, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        images, parquet = Path(folder, "images"), Path(folder, "parquet")
        images.mkdir()
        cut(flags.images, images)
        files = ray.data.read_binary_files(str(images), include_paths=True, override_num_blocks=4 * flags.actors)

        described = devicemap.ray.map_batches(files, describe, concurrency=flags.actors)
        described.write_parquet(str(parquet))

        rows = sorted(ray.data.read_parquet(str(parquet)).take_all(), key=lambda row: row["path"])
        assert [Path(row["path"].decode()).name for row in rows] == sorted(file.name for file in images.iterdir())
        for row in rows[:: max(1, len(rows) // 10)]:
            wanted = describe({"path": row["path"], "bytes": tf.io.read_file(row["path"])})
            for name in ("size", "tones", "edges"):
                np.testing.assert_allclose(row[name], wanted[name], rtol=TOLERANCE, atol=TOLERANCE)
        for row in rows:
            row["path"] = row["path"].decode()
        size = sum(file.stat().st_size for file in parquet.iterdir())
    ray.shutdown()
    same = draw(rows, flags.output)
    print(
        f"{len(rows)} images, each once, in {size / 1e3:,.0f} kB of Parquet; their features are those of one process."
    )
    print(f"Of the images most alike, {same:.0%} are of the same photograph. Picture: {flags.output}")


if __name__ == "__main__":
    main()
