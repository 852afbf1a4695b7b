"""The options of `parallel_map` and `DeviceMap`: their defaults and valid values."""

from __future__ import annotations

import difflib
import inspect
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

import tensorflow as tf

from devicemap.errors import OptionError, UnknownOptionError

_ELSEWHERE = {
    **dict.fromkeys(("gpus", "n_jobs", "num_workers", "workers"), "devices"),
    **dict.fromkeys(("num_parallel_calls", "parallel_iterations"), "prefetch"),
    **dict.fromkeys(("batch", "chunksize"), "batch_size"),
    **dict.fromkeys(("dtype", "output_signature"), "fn_output_signature"),
    "jit": "jit_compile",
    "verbose": "progress",
}
"""Names of options in `tf.map_fn`, Keras, JAX, joblib and `multiprocessing`."""


@dataclass(frozen=True)
class Options:
    """Checked options, which the docstring of `parallel_map` describes."""

    devices: Any = None
    batched: bool = False
    vectorize: bool | str = "auto"
    batch_size: int | str | None = None
    seed: int | None = None
    fn_output_signature: Any = None
    jit_compile: bool = False
    in_place: Any = ()
    output_device: Any = "/CPU:0"
    deterministic: bool = True
    prefetch: int | None = None
    max_retries: int = 2
    on_error: str = "raise"
    progress: Any = False
    name: str | None = None

    @property
    def chunk_rows(self) -> int | None:
        """The rows of each chunk, if the user fixes their number."""
        return self.batch_size if isinstance(self.batch_size, int) else None

    @property
    def skips(self) -> bool:
        """Whether rows that fail are left out."""
        return self.on_error == "skip"

    @property
    def needs_chunks(self) -> bool:
        """Whether eager calls on data in memory always run in chunks."""
        return self.batch_size is not None or self.skips


def check_options(fn: Any, options: dict[str, Any]) -> Options:
    """Return the user's options, with defaults for those that are not given.

    Raises:
        UnknownOptionError: for a name that is not an option; the message suggests the nearest one.
        OptionError: for an invalid value of an option, and for a `fn` that is not callable, is async or is a generator.
    """
    names = [field.name for field in fields(Options)]
    for name in options:
        if name not in names:
            near = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UnknownOptionError(f"{name!r} is not an option{hint} The options are {', '.join(names)}")
    if not callable(fn):
        raise OptionError(f"fn is of type {type(fn).__name__}, not callable; fn comes first, then the data")
    called = fn if inspect.isroutine(fn) or isinstance(fn, partial) else type(fn).__call__
    if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise OptionError(
            "fn is an async function or a generator, which computes nothing when it is called; expected a function that "
            "returns a result"
        )
    checked = Options(**options)
    size, prefetch, seed, label = checked.batch_size, checked.prefetch, checked.seed, checked.name

    def expect(name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise OptionError(f"{name}={getattr(checked, name)!r}; expected {expected}")

    for flag in ("batched", "jit_compile", "deterministic"):
        expect(flag, isinstance(getattr(checked, flag), bool), "True or False")
    expect("vectorize", isinstance(checked.vectorize, bool) or _is_auto(checked.vectorize), "True, False or 'auto'")
    valid = size is None or _is_auto(size) or _is_int(size, 1)
    expect("batch_size", valid, "None, 'auto' or a 64-bit int of at least 1, in rows per device call")
    expect("fn_output_signature", _is_signature(checked.fn_output_signature), "a nest of dtypes and tf.TypeSpecs")
    valid = prefetch is None or _is_int(prefetch, 1)
    expect("prefetch", valid, "None or an int of at least 1: how many chunks are under way on a device")
    expect(
        "max_retries", _is_int(checked.max_retries, 0), "an int of at least 0: how often a failed chunk is tried again"
    )
    expect("on_error", checked.on_error in ("raise", "skip"), "'raise' or 'skip'")
    expect("seed", seed is None or (_is_int(seed, 0) and seed < 2**32), "None or an int from 0 to 2**32 - 1")
    expect("name", label is None or (isinstance(label, str) and label != ""), "None or a non-empty string")
    if checked.batched and isinstance(checked.vectorize, bool):
        raise OptionError(
            f"vectorize={checked.vectorize!r} with batched=True: fn takes whole batches, there is nothing to vectorise; "
            "leave vectorize out, or set batched=False for a fn of one sample"
        )
    if checked.batched and checked.fn_output_signature is not None:
        raise OptionError("fn_output_signature with batched=True: it is for a fn of one sample; leave it out")
    check_progress(checked.progress)
    size = int(size) if isinstance(size, Integral) else size
    return replace(checked, in_place=variables_of(checked.in_place), batch_size=size)


def variables_of(in_place: Any) -> tuple[tf.Variable, ...]:
    """Return the `tf.Variable`s of the option `in_place`, also of Keras's variables.

    Raises:
        OptionError: for anything that is not a variable.
    """
    found = []
    for given in tf.nest.flatten(in_place):
        variable = given if isinstance(given, tf.Variable) else getattr(given, "value", None)
        if not isinstance(variable, tf.Variable):
            raise OptionError(f"in_place has {given!r:.80}; expected a tf.Variable, or a list of them")
        found.append(variable)
    return tuple(found)


def check_progress(progress: Any) -> Any:
    """Return a valid value of the option `progress`; raise `OptionError` for others."""
    if not isinstance(progress, bool) and not callable(progress):
        raise OptionError(f"progress={progress!r}; expected True, False, or a callable that takes the events")
    return progress


def check_count(name: str, value: Any) -> None:
    """Raise `OptionError` unless the value is an int of at least 1."""
    if not _is_int(value, 1):
        raise OptionError(f"{name}={value!r}; expected a 64-bit int of at least 1")


def check_choice(name: str, value: Any, *choices: str | None) -> None:
    """Raise `OptionError` unless the value is one of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise OptionError(f"{name}={value!r}; expected {', '.join(others)} or {last}")


def check_number(name: str, value: Any) -> None:
    """Raise `OptionError` unless the value is `None` or a finite number of at least 0."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= float(value) < math.inf):
        raise OptionError(f"{name}={value!r}; expected None or a number of at least 0")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < 2**63


def _is_signature(nest: Any) -> bool:
    try:
        for leaf in () if nest is None else tf.nest.flatten(nest):
            if not isinstance(leaf, tf.TypeSpec):
                tf.as_dtype(leaf)
    except TypeError:
        return False
    return True
