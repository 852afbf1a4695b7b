"""Run the programs of docs/reference/mirroredstrategy.md on two logical CPUs, under `MirroredStrategy` and parallelized.

`python -m clients.mirrored [NAME]` compares one program with one device, or each in a process of its own: after an error, all
collective ops of a process fail.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import devicemap

DEVICES = ["CPU:1", "CPU:0"]


def compare(case: Any, parallelize: bool) -> str:
    """Return whether a program computes what one device does: weights, losses, metrics, outputs."""
    scope = contextlib.nullcontext() if parallelize else tf.distribute.MirroredStrategy(DEVICES).scope()
    try:
        with scope:
            model = case.made()
            got = case.trained(devicemap.parallelize(model, DEVICES) if parallelize else model)
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:120]} ... {text[-160:]}"
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(case.wanted))]
    if shapes := [f"{a.shape} for {b.shape}" for a, b in pairs if a.shape != b.shape]:
        return f"differs: {shapes[0]}"
    largest = max(float(np.max(np.abs(a - b), initial=0)) for a, b in pairs)
    return "as one device" if largest < 1e-5 else f"differs by {largest:.2g}"


def main(name: str | None = None) -> None:
    devicemap.simulate_devices(len(DEVICES))
    from mirrored import FIXED, PROGRAMS, REFUSED  # after the devices, as it makes tensors

    programs = PROGRAMS | REFUSED | FIXED
    if name is not None:
        print(f"{name}\n  MirroredStrategy: {compare(programs[name], False)}")
        print(f"  devicemap: {compare(programs[name], True)}")
        return
    for each in programs:
        command = [sys.executable, "-m", "clients.mirrored", each]
        subprocess.run(command, stderr=subprocess.DEVNULL, timeout=300, check=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
