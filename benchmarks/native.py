"""Compile the C++ of the simulator, the emulated GPUs and the copy meter: `python -m benchmarks.native`.

Tests and benchmarks compile what is missing themselves; `make` does it beforehand, so that no test waits for it. Exits with
status 1 if this machine cannot compile, with the reason.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks import softgpu, traffic
from benchmarks.simulator import building

_BUILDS = building.build, softgpu.compile_library, traffic.compile_library


def main() -> None:
    """Compile all three libraries, or exit with the reason."""
    try:
        with ThreadPoolExecutor() as pool:
            for library in pool.map(lambda build: build(), _BUILDS):
                print(library)
    except building.Unavailable as reason:
        sys.exit(f"Tests and benchmarks on simulated devices cannot run: {reason}")


if __name__ == "__main__":
    main()
