"""Draw mutants of the package and report those that no test notices: `make mutants N=200`.

A mutant is a copy of one module with one change, such as `<` instead of `<=`. `line_tests.py` records the tests that execute
each line. Each mutant runs in a forked process against tests of its line, the fastest first, until one fails. No file
changes: an import hook serves the mutated module. Processes that tests start import the unchanged package.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ |= {"CI": "true", "TF_CPP_MIN_LOG_LEVEL": "3"}  # with CI=true, Hypothesis draws the same examples each time

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "mutants"
"""Where `line_tests.py` has written its files, and the output of the tests goes."""

FOLDERS = ("compile", "run", "store", "training")
START_SECONDS = 20.0
"""A test is stopped after these seconds and four times those that it took when it was recorded."""

CONFTEST = Path("tests", "conftest.py")

UNREWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"
"""Packages with pytest plugins, which are imported before it starts."""

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
"""Operators and statements, and those that replace them."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text between two positions `(line, column in bytes)` is replaced."""

    path: str
    start: tuple[int, int]
    stop: tuple[int, int]
    lines: tuple[int, int]
    """First and last line of the statement, or of its head if it contains others."""

    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.start[0]}: {' '.join(self.before.split())}  ->  {self.after}"

    def source(self) -> str:
        """Return the text of the mutated module."""
        lines = (ROOT / self.path).read_bytes().splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.stop
        head, tail = b"".join(lines[: first - 1]) + lines[first - 1][:left], lines[last - 1][right:]
        return (head + self.after.encode() + tail + b"".join(lines[last:])).decode()


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield changes of a node of a syntax tree: which of its nodes is replaced, and the text that replaces it."""
    replaced = copy.copy(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            replaced.ops = [SWAPS[type(op)]()]
            yield node, ast.unparse(replaced)
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in SWAPS:
            replaced.op = SWAPS[type(op)]()
            yield node, f"({ast.unparse(replaced)})"
        case ast.AugAssign(op=op):
            yield node, "pass"
            if type(op) in SWAPS:
                replaced.op = SWAPS[type(op)]()
                yield node, ast.unparse(replaced)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, str(value + 1)
        case ast.Call(func=ast.Name(id=("min" | "max") as name)):
            yield node.func, "min" if name == "max" else "max"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None"
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Break() | ast.Continue():
            yield node, ast.unparse(SWAPS[type(node)]())
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                replaced = copy.copy(node)
                replaced.keywords = node.keywords[:i] + node.keywords[i + 1 :]
                yield node, ast.unparse(replaced)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a module: changes in the bodies of its functions, except in errors and formatted messages."""
    source = path.read_text(encoding="utf-8")

    def visit(node: ast.AST, lines: tuple[int, int], inside: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = node.lineno, body[0].lineno - 1 if body else node.end_lineno or node.lineno
        for part, after in changes(node) if inside else ():
            before = ast.get_source_segment(source, part) or ""
            start, stop = (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)
            yield Mutant(str(path.relative_to(ROOT)), start, stop, (lines[0], max(lines)), before, after)
        children = list(ast.iter_child_nodes(node))
        match node:
            case ast.Raise() | ast.JoinedStr():
                children = []
            case ast.FunctionDef(name=name):
                children, inside = [] if name == "__repr__" else node.body, True
            case ast.Lambda():
                children = [node.body]
            case ast.AnnAssign():
                children = [node.value] if node.value else []
        for child in children:
            yield from visit(child, lines, inside)

    return visit(ast.parse(source), (1, 1), False)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw mutants of different lines: each line that has some is as likely as the others."""
    by_line: defaultdict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / "devicemap" / folder).glob("*.py")):
            for mutant in mutants_of(path):
                by_line[mutant.path, mutant.start[0]].append(mutant)
    chance = random.Random(seed)
    return [chance.choice(by_line[line]) for line in sorted(chance.sample(sorted(by_line), min(count, len(by_line))))]


class Record:
    """What `line_tests.py` has recorded."""

    def __init__(self, folder: Path):
        import coverage

        self.seconds: dict[str, float] = {}
        lines: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for path in sorted(folder.glob("*.coverage")):
            self.seconds |= json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            data = coverage.CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                for line, tests in data.contexts_by_lineno(file).items():
                    lines[str(Path(file).relative_to(ROOT)), line].update(tests)
        self._rows = {test: row for row, test in enumerate(sorted(self.seconds, key=self.seconds.__getitem__))}
        self._columns = {line: column for column, line in enumerate(lines)}
        self._executed = np.zeros([len(self._rows), len(lines)], np.float32)
        for line, tests in lines.items():
            self._executed[[self._rows[test] for test in tests & self._rows.keys()], self._columns[line]] = 1

    def tests(self, mutant: Mutant, most_seconds: float) -> list[str]:
        """Return the tests to run: of the replaced lines, or else of their statement; the fastest first.

        If these take too long, take those that execute as many other lines of the package as possible.
        """
        columns: list[int] = []
        for first, last in ((mutant.start[0], mutant.stop[0]), mutant.lines):
            columns = columns or [
                self._columns[mutant.path, line]
                for line in range(first, last + 1)
                if (mutant.path, line) in self._columns and self._executed[:, self._columns[mutant.path, line]].any()
            ]
        names, seconds = np.array([*self._rows]), np.array([*map(self.seconds.__getitem__, self._rows)])
        left = self._executed[:, columns].any(1)
        chosen, new = np.zeros_like(left), np.ones(len(self._columns), np.float32)
        while (left := left & ~chosen & (seconds <= most_seconds - seconds[chosen].sum())).any():
            gains = (self._executed[left] @ new + 0.01) / (seconds[left] + 0.1)
            best = np.flatnonzero(left)[gains.argmax()]
            chosen[best] = True
            new *= 1 - self._executed[best]
        return names[chosen].tolist()


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """An import hook that serves one mutated module."""

    def __init__(self, mutant: Mutant):
        self._path, self._source = str(ROOT / mutant.path), mutant.source()
        self._name = ".".join(Path(mutant.path).with_suffix("").parts).removesuffix(".__init__")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        found = fullname == self._name
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self) if found else None

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return self._source.encode()


class Plugin:
    """A pytest plugin that installs the import hook, keeps the order of the tests, and sends those that fail."""

    def __init__(self, mutant: Mutant | None, tests: Sequence[str], failed: Any):
        self._mutant, self._places, self._failed = mutant, {test: i for i, test in enumerate(tests)}, failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        if self._mutant is not None:  # before pytest's own hook, which serves modules whose doctests run
            sys.meta_path.insert(0, Mutated(self._mutant))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self._places.get(item.nodeid, 0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.send(report.nodeid)


def _test(mutant: Mutant | None, tests: Sequence[str], failed: Any, log: Path, timeout: float) -> None:
    os.setsid()
    os.dup2(os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
    os.dup2(1, 2)
    # conftest.py has the option --all, without which it would select some of the parameters. pytest finds it below `tests`.
    options = f"-q --all --timeout={timeout} -p no:cacheprovider -W {UNREWRITTEN} --rootdir {ROOT} {ROOT / CONFTEST}"
    arguments = [*options.split(" "), *(["-x"] if mutant else []), *tests]
    code = pytest.main(arguments, [Plugin(mutant, tests, failed)])
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads


def failures(log: str, mutant: Mutant | None, seconds: Mapping[str, float]) -> list[str]:
    """Run tests, which have taken these seconds, on a mutant until one fails, or all on the package as it is.

    Returns:
        Which tests failed, or how the process ended, if it did not end well.
    """
    forks = multiprocessing.get_context("fork")
    receiver, sender = forks.Pipe(duplex=False)
    timeout = START_SECONDS + 4 * max(seconds.values())
    process = forks.Process(target=_test, args=(mutant, [*seconds], sender, FOLDER / f"{log}.log", timeout))
    process.start()
    process.join(2 * START_SECONDS + 4 * sum(seconds.values()))
    late = process.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and processes that tests have started
    process.join()
    failed = []
    while receiver.poll():
        failed.append(receiver.recv())
    if process.exitcode and not failed:
        failed.append("timeout" if late else f"exit code {process.exitcode}")
    return failed


class Trial:
    """The tests of mutants, several at a time."""

    def __init__(self, mutants: Mapping[int, Mutant], seconds: float, pool: ProcessPoolExecutor):
        self._mutants, self._seconds, self._pool = mutants, seconds, pool
        self._record = Record(FOLDER)

    def start(self, number: int, unchanged: bool = False, without: Collection[str] = ()) -> Future[list[str]] | None:
        """Run the tests of a mutant, or the same tests on the package as it is. `None` if there are no tests."""
        mutant = self._mutants[number]
        tests = [test for test in self._record.tests(mutant, self._seconds) if test not in without]
        log = f"{number} unchanged" if unchanged else str(number)
        return self._run(log, None if unchanged else mutant, tests) if tests else None

    def _run(self, log: str, mutant: Mutant | None, tests: Sequence[str]) -> Future[list[str]]:
        return self._pool.submit(failures, log, mutant, {test: self._record.seconds[test] for test in tests})

    def unreliable(self, killers: Mapping[int, str]) -> list[str]:
        """Return those of the failed tests that fail without a mutant, too, and so have not killed one."""
        tests = sorted({*killers.values()} & self._record.seconds.keys())
        runs = [self._run("unchanged", None, tests)] if tests else []
        # A process was late or crashed: the same must not happen without the mutant.
        runs += filter(None, [self.start(n, unchanged=True) for n, killer in killers.items() if killer not in tests])
        return [failed for run in runs for failed in run.result()]


def main() -> None:
    """Draw mutants, test them, and print a line for each and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="the most seconds of tests for each mutant; more may kill survivors"
    )
    parser.add_argument("--only", type=int, nargs="*", help="test only the mutants with these numbers")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    # Once, instead of in each process. TensorFlow creates its devices later.
    for module in ("hypothesis", "keras", "tensorflow"):
        importlib.import_module(module)

    mutants = dict(enumerate(drawn(options.count, options.seed)))
    if options.only is not None:
        mutants = {number: mutants[number] for number in options.only}
    killers: dict[int, str] = {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        trial = Trial(mutants, options.seconds, pool)

        def collect(runs: Mapping[int, Future[list[str]] | None], without: Collection[str] = ()) -> None:
            for number, run in runs.items():
                failed = [each for each in run.result() if each not in without] if run else []
                killers.update({number: failed[0]} if failed else {})
                survived = "survived its tests" if run else "survived: no test executes it"
                print(f"{number:3} {mutants[number]}\n    {failed[0] if failed else survived}", flush=True)

        collect({number: trial.start(number) for number in mutants})
        if unreliable := trial.unreliable(killers):
            print("These fail without a mutant, too:", *unreliable, "Without them:", sep="\n    ")
            again = [number for number, killer in killers.items() if killer in unreliable]
            for number in again:
                del killers[number]
            collect({number: trial.start(number, without=unreliable) for number in again}, unreliable)
    for folder in FOLDERS:
        numbers = [number for number, mutant in mutants.items() if Path(mutant.path).parent.name == folder]
        print(f"{folder}: {len(numbers)} mutants, {sum(number not in killers for number in numbers)} survive")
    print(f"{len(mutants)} mutants, {len(mutants) - len(killers)} survive:")
    print(*(f"{number:3} {mutant}" for number, mutant in mutants.items() if number not in killers), sep="\n")


if __name__ == "__main__":
    main()
