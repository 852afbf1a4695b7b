"""Run the suite, and write the tables.

    python -m benchmarks                 # everything, into benchmarks/results/
    python -m benchmarks balance memory  # these topics only
    python -m benchmarks --quick         # small cases, into a folder that is thrown away: that the suite works

TensorFlow makes its devices once per process, so each file of cases runs in a process of its own for each number of
devices. When it has passed, its results replace those of the previous run in `raw/`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report

HERE = Path(__file__).parent

COUNTS = {
    "balance": (8,),
    "batch_size": (8,),
    "streaming": (8,),
    "memory": (8,),
    "reduce": (8,),
    "store": (2,),
    "call_cost": (1, 2, 8, 16),
    "gathering": (8,),
    "captured": (8,),
    "scaling": (1, 2, 4, 8, 16),
    "real_functions": (1,),
    "first_result": (4, 16),
    "training": (2, 8),
    "pipeline": (4,),
    "hosts": (4,),
    "ray": (1,),
    "balance_gpus": (8,),
    "pipeline_gpus": (4,),
}
"""On how many devices each topic runs, in this order: what the targets ask for."""

QUICK_DEVICES = 4

TIMEOUT_SECONDS = 1800
"""For one process; all of them together take about an hour."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(COUNTS)}; all without one")
    parser.add_argument("--quick", action="store_true", help="small cases, once, on 4 devices")
    parser.add_argument(
        "--devices", type=int, action="append", help="in place of the topics' own numbers; may be repeated"
    )
    options = parser.parse_args()
    if unknown := set(options.topics) - set(COUNTS):
        parser.error(f"no topic {', '.join(sorted(unknown))}; expected some of {', '.join(COUNTS)}")
    topics = options.topics or list(COUNTS)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            status = run(topics, [QUICK_DEVICES], Path(folder), ["--quick"])
            report.write(Path(folder))  # targets are not for so short a run
    else:
        status = run(topics, options.devices, report.RESULTS)
        report.main()
    return status


def run(topics: Sequence[str], counts: Sequence[int] | None, folder: Path, extra: Sequence[str] = ()) -> int:
    """Run each topic on each number of devices, and return 1 if a run failed. Other results of the folder stay."""
    raw = folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    jobs = [(topic, count, raw / f"{topic}-{count:02}.json") for topic in topics for count in counts or COUNTS[topic]]
    failed = [path.stem for topic, count, path in jobs if not measure(topic, count, path, extra)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def measure(topic: str, devices: int, path: Path, extra: Sequence[str]) -> bool:
    """Run pytest in a process. If all cases passed, the results replace what was at `path`; returns whether they did."""
    part = path.with_suffix(".part")
    command = [
        sys.executable, "-m", "pytest", str(HERE / f"test_{topic}.py"), f"--devices={devices}", f"--benchmark-json={part}",
        "-q", "-p", "no:warnings", "-p", "no:cacheprovider", "--benchmark-columns=median,iqr,rounds", "--benchmark-sort=name",
        *extra, *(["--softgpus"] if topic.endswith("_gpus") else []),
    ]  # fmt: skip
    print(f"{topic} on {devices} devices", flush=True)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": str(HERE.parent)}  # for processes of peers
    try:
        subprocess.run(command, cwd=HERE.parent, timeout=TIMEOUT_SECONDS, env=environment, check=True)
        part.replace(path)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        part.unlink(missing_ok=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
