"""The options of `parallel_map` and `DeviceMap`: their defaults, and what each may be."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import tensorflow as tf

from devicemap.errors import OptionError, UnknownOptionError

_ELSEWHERE = {
    **dict.fromkeys(("gpus", "n_jobs", "num_workers"), "devices"),
    **dict.fromkeys(("batch", "chunksize"), "batch_size"),
    **dict.fromkeys(("dtype", "output_signature"), "fn_output_signature"),
    "jit": "jit_compile",
    "verbose": "progress",
}
"""What options are called in `tf.map_fn`, Keras, JAX, joblib and `multiprocessing`."""


@dataclass(frozen=True)
class Options:
    """Checked options; the docstring of `parallel_map` says what they mean."""

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
    progress: Any = False
    name: str | None = None


def check_options(fn: Any, options: dict[str, Any]) -> Options:
    """Make `Options` of what the user gave.

    Raises:
        UnknownOptionError: for a name that is not an option; the message holds the nearest one.
        OptionError: for a value that the option cannot have, and for an `fn` that cannot be called.
    """
    names = [field.name for field in fields(Options)]
    for name in options:
        if name not in names:
            near = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UnknownOptionError(f"{name!r} is not an option{hint} The options are {', '.join(names)}")
    if not callable(fn):
        raise OptionError(f"fn is of type {type(fn).__name__}, not callable; fn comes first, then the data")
    checked = Options(**options)
    for name in ("batched", "jit_compile", "deterministic"):
        value = getattr(checked, name)
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}; expected True or False")
    if not isinstance(checked.vectorize, bool) and not _is_auto(checked.vectorize):
        raise OptionError(f"vectorize={checked.vectorize!r}; expected True, False or 'auto'")
    if checked.batched and isinstance(checked.vectorize, bool):
        raise OptionError(
            f"vectorize={checked.vectorize!r} with batched=True: fn takes whole batches, there is nothing to vectorise; "
            "leave vectorize out, or set batched=False for a fn of one sample"
        )
    if checked.batched and checked.fn_output_signature is not None:
        raise OptionError("fn_output_signature with batched=True: it is for a fn of one sample; leave it out")
    if not (checked.batch_size is None or _is_auto(checked.batch_size) or _is_int(checked.batch_size, 1)):
        raise OptionError(
            f"batch_size={checked.batch_size!r}; expected None, 'auto' or an int of at least 1, in rows per device call"
        )
    for leaf in tf.nest.flatten(checked.fn_output_signature):
        if leaf is not None and not isinstance(leaf, tf.TypeSpec):
            try:
                tf.as_dtype(leaf)
            except TypeError as error:
                raise OptionError(
                    f"fn_output_signature={checked.fn_output_signature!r}; expected a nest of dtypes and tf.TypeSpecs"
                ) from error
    if checked.prefetch is not None and not _is_int(checked.prefetch, 1):
        raise OptionError(
            f"prefetch={checked.prefetch!r}; expected None or an int of at least 1: how many chunks are under way on a device"
        )
    if not _is_int(checked.max_retries, 0):
        raise OptionError(
            f"max_retries={checked.max_retries!r}; expected an int of at least 0: how often a failed chunk is tried again"
        )
    check_progress(checked.progress)
    if checked.seed is not None and not (_is_int(checked.seed, 0) and checked.seed < 2**32):
        raise OptionError(f"seed={checked.seed!r}; expected None or an int from 0 to 2**32 - 1")
    if checked.name is not None and not (isinstance(checked.name, str) and checked.name):
        raise OptionError(f"name={checked.name!r}; expected None or a non-empty string")
    checked = replace(checked, in_place=variables_of(checked.in_place))
    size = checked.batch_size
    return replace(checked, batch_size=int(size)) if isinstance(size, Integral) else checked


def variables_of(in_place: Any) -> tuple[tf.Variable, ...]:
    """The option `in_place`, with the `tf.Variable`s that Keras's stand for.

    Raises:
        OptionError: for what is no variable.
    """
    found = []
    for given in tf.nest.flatten(in_place):
        variable = given if isinstance(given, tf.Variable) else getattr(given, "value", None)
        if not isinstance(variable, tf.Variable):
            raise OptionError(f"in_place has {given!r}; expected a tf.Variable, or a list of them")
        found.append(variable)
    return tuple(found)


def check_progress(progress: Any) -> Any:
    """The option `progress`, which makes no difference to what `fn` is compiled to.

    Raises:
        OptionError: for a value that it cannot have.
    """
    if not isinstance(progress, bool) and not callable(progress):
        raise OptionError(f"progress={progress!r}; expected True, False, or a callable that takes the events")
    return progress


def check_count(name: str, value: Any) -> None:
    """Raise `OptionError` for what is no number of things, of at least one."""
    if not _is_int(value, 1):
        raise OptionError(f"{name}={value!r}; expected an int of at least 1")


def check_number(name: str, value: Any) -> None:
    """Raise `OptionError` for a value that is neither `None` nor a finite number of at least 0."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= float(value) < math.inf):
        raise OptionError(f"{name}={value!r}; expected None or a number of at least 0")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
