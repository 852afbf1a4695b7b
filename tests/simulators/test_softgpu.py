"""The GPUs in software that the laws run on, too: that they are devices as TensorFlow knows them, and tell what they did.

`pytest --confcutdir=tests/simulators/softgpus tests/simulators/softgpus/traffic.py` runs one of the files, as those tests do.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("files", ["devices chunks", "traffic plans", "cut memory", "training pipelines"])
def test_on_gpus_in_software(files: str) -> None:
    """In a process of its own for each number and size of GPUs, since devices are made once."""
    paths = (str(FILES / f"{name}.py") for name in files.split())
    if processes.run(RUN, f"--confcutdir={FILES}", *paths) == ["none"]:
        pytest.skip("this TensorFlow has no GPUs in software")
