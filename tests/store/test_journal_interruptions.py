"""A folder of results whose writer is killed, interrupted, closed or forked in the middle of a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from journals import HEADER, append, check_whole, run_alone, untouched, write_missing
from journals import written as written

from devicemap.errors import JournalError
from devicemap.store import journal as journal_module
from devicemap.store.chunks import pack_arrays
from devicemap.store.journal import open_journal
from devicemap.store.records import JOURNAL

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@needs_fork
def test_killed_at_every_step(tmp_path: Path) -> None:
    """Kill the process before each call of the operating system in turn, and halfway through each write."""
    code = """
import itertools, json, signal
def die(): os.kill(os.getpid(), signal.SIGKILL)
def dying(name, call, steps, fatal):
    def wrapped(*args, **options):
        if next(steps) == fatal:
            if name == "write": call(args[0], args[1][: len(args[1]) // 2])
            die()
        return call(*args, **options)
    return wrapped
def child(directory, fatal):
    steps = itertools.count()
    for name in ["open", "write", "fsync", "unlink", "ftruncate", "listdir", "close"]:
        setattr(os, name, dying(name, getattr(os, name), steps, fatal))
    write(directory, 12)
    os._exit(0)
found = []
for fatal in itertools.count():
    directory = f"{sys.argv[2]}/{fatal}"
    pid = os.fork()
    if not pid: child(directory, fatal)
    if os.waitpid(pid, 0)[1] == 0: break
    left = len(os.listdir(directory)) if os.path.exists(directory) else 0
    found.append((left, write(directory, 12)))
print(json.dumps(found))
"""
    found = run_alone(code, tmp_path)
    assert len(found) > 30  # steps
    computed = [count for _, count in found]
    assert computed == sorted(computed, reverse=True)  # the later it died, the less is missing
    assert set(computed) == {0, 1, 2, 3}
    for fatal in range(len(found) + 1):
        check_whole(tmp_path / str(fatal))


def test_an_interruption_in_the_middle_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same journal goes on, and so does another run; half a chunk is nowhere."""
    whole_write = os.write

    def interrupted(descriptor: int, data: Any) -> int:
        whole_write(descriptor, data[:10])
        raise KeyboardInterrupt

    with open_journal(tmp_path, HEADER) as journal:
        append(journal, 0, 4)
        size = (tmp_path / "chunks-000000.bin").stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                append(journal, 4, 8)
        assert (tmp_path / "chunks-000000.bin").stat().st_size == size
        append(journal, 4, 8)
    assert write_missing(tmp_path) == [(8, 12)]
    check_whole(tmp_path)


def test_leftovers_are_taken_away_before_the_next_write(written: Path) -> None:
    """Half a line, and files without a chunk that is believed; but not what somebody else has put there."""
    lines = (written / JOURNAL).read_bytes().splitlines(keepends=True)
    (written / JOURNAL).write_bytes(b"".join(lines[:3]) + lines[3][:-9])
    (written / "chunks-000007.bin").write_bytes(b"half")
    (written / "notes.txt").write_text("mine")
    with untouched(written), open_journal(written, HEADER) as journal:
        assert journal.missing(0, 12) == [(8, 12)]
    assert write_missing(written, [(0, 9), (9, 12)]) == [(8, 9), (9, 12)]
    assert (written / "notes.txt").read_text() == "mine"
    (written / "notes.txt").unlink()
    check_whole(written, [(0, 4), (4, 8), (8, 9), (9, 12)])


def test_closed_while_a_chunk_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot be stopped may finish its chunk after the call has ended, and the folder is another's."""
    journal = open_journal(tmp_path, HEADER)

    def closed_meanwhile(arrays: Any) -> bytes:
        journal.close()
        return pack_arrays(arrays)

    monkeypatch.setattr(journal_module, "pack_arrays", closed_meanwhile)
    with pytest.raises(JournalError, match="is closed"):
        append(journal, 0, 4)
    with pytest.raises(JournalError, match="is closed"):
        append(journal, 4, 8)
    with pytest.raises(JournalError, match="is closed"):
        journal.finish(0)
    assert os.listdir(tmp_path) == [JOURNAL]
    journal.close()


@needs_fork
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Even where it was forked in the middle of a chunk."""
    code = """
import json, signal
children, (told, tells), fsync = [], os.pipe(), os.fsync
def forking(descriptor):
    if not children:
        children.append(os.fork())
        if not children[0]:
            journal.close()  # although the one thread of this process is inside of append
            os.write(tells, b"closed")
            signal.pause()
    fsync(descriptor)
journal = open_journal(sys.argv[2], header(12))
os.fsync = forking
journal.append(0, 4, {"0.values": np.arange(4) ** 2}, "digest of 0")
os.read(told, 6)
said = []
for _ in range(2):
    try: open_journal(sys.argv[2], header(12)).close(); said.append("opened")
    except OSError as error: said.append(str(error))
    journal.close()
computed = write(sys.argv[2], 12)
os.kill(children[0], signal.SIGKILL)
os.waitpid(children[0], 0)
print(json.dumps([*said, computed]))
"""
    refused, opened, computed = run_alone(code, tmp_path)
    assert "is being written to" in refused
    assert (opened, computed) == ("opened", 2)
    check_whole(tmp_path)
