"""Time ways of doing one thing side by side: warm up, check, interleave, take medians; and write down what came out."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import devicemap

RESULTS = pathlib.Path(__file__).parent / "results"


def compare(
    ways: dict[str, Callable[[], Any]], rounds: int, calls: int = 1, tolerance: float = 1e-4
) -> dict[str, list[float]]:
    """Seconds per call of each way, one number per round.

    The ways take turns in an order that changes, so that noise meets all of them, and what one leaves running in the
    background (a pipeline that reads ahead) not always the same other.

    Every way must give the answer of the first one to a relative `tolerance`, before anything is timed.
    """
    answers = {name: way() for name, way in ways.items()}
    first = next(iter(answers.values()))
    for name, answer in answers.items():
        np.testing.assert_allclose(answer, first, rtol=tolerance, atol=tolerance, err_msg=name)
    for way in ways.values():
        for _ in range(calls):
            wait(way())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds):
        for name, way in order.sample(list(ways.items()), len(ways)):
            start = time.perf_counter()
            for _ in range(calls):
                result = way()
            wait(result)
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def wait(result: Any) -> None:
    """Wait for the devices: a result is on the host when its numbers are."""
    for leaf in tf.nest.flatten(result):
        np.asarray(leaf)


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def spread(seconds: list[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / median(seconds)


def machine() -> str:
    return (
        f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, devicemap {devicemap.__version__}"
    )


def save(name: str, table: str, measured: Any) -> None:
    """Write the table as Markdown and everything measured as JSON, and print the table."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(table)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), "seconds": measured}, indent=1) + "\n")
    print(table)
