"""The GPUs in software that the laws run on, too: that they are devices as TensorFlow knows them, and tell what they did.

`pytest --confcutdir=tests/simulators/softgpus tests/simulators/softgpus/traffic.py` runs one of the files, as those tests do,
with `-m slow` what is marked slow in it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest

FILES = Path(__file__).with_name("softgpus")
RUN = """
import contextlib, sys
import pytest

with contextlib.redirect_stdout(sys.stderr):
    code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
print("none" if code == pytest.ExitCode.NO_TESTS_COLLECTED else "some")
sys.exit(code != pytest.ExitCode.NO_TESTS_COLLECTED and code)
"""


QUICK = {"devices chunks": "not slow", "traffic plans": "not slow", "cut memory": "not slow"}
SLOW = {"plans": "slow", "training": "not slow"}, {"pipelines": "not slow", "budgets": "not slow"}
"""Files that take long: what is marked slow in them, or all that they hold."""


@pytest.mark.parametrize(
    "files", [QUICK, *(pytest.param(files, marks=pytest.mark.slow) for files in SLOW)], ids=" ".join
)
def test_on_gpus_in_software(files: dict[str, str]) -> None:
    """In a process of its own for each number and size of GPUs, since devices are made once.

    They run at the same time, as TensorFlow waits ten seconds for memory before it says that there is none.
    """

    def run(names: str) -> list[str]:
        paths = (str(FILES / f"{name}.py") for name in names.split())
        return processes.run(RUN, f"--confcutdir={FILES}", "-m", files[names], *paths)

    with ThreadPoolExecutor(len(files)) as pool:
        ended = [*pool.map(run, files)]
    if ["none"] in ended:
        pytest.skip("this TensorFlow has no GPUs in software")
