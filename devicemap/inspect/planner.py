"""Collect the facts of a `Plan`, from data or specs, the traced function, and what it captures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from devicemap.compile.audit import Treatment, variable_of, writing_line
from devicemap.compile.program import Program
from devicemap.compile.replicas import home_of
from devicemap.compile.trace import Traced
from devicemap.data.rows import Rows, as_rows
from devicemap.data.sources import DatasetSource, from_dataset
from devicemap.errors import DataError
from devicemap.events import Shard
from devicemap.inspect.plan import CapturedValue, DevicePlan, Handling, Plan
from devicemap.options import Options
from devicemap.run.mapper import in_flight

_UNNAMED = ("", "Variable", "StateVar")
"""TensorFlow's names of variables and generator states without a name."""

_HANDLINGS: dict[Treatment | None, Handling] = {
    None: Handling.KEPT,
    Treatment.READ: Handling.COPIED,
    Treatment.STAYS: Handling.LOOKED_UP,
    Treatment.ATOMIC: Handling.ATOMIC,
    Treatment.SEED: Handling.SEED,
    Treatment.ORDERED: Handling.ORDERED,
}


def specs_and_count(data_or_spec: Any, options: Options) -> tuple[Rows | DatasetSource, int | None]:
    """Return data, a dataset or specs as a value with specs, and the number of rows, `None` if unknown. Nothing is read."""
    if not tf.executing_eagerly():
        raise DataError(
            "a plan cannot be made inside a tf.function; call explain outside of it, with data or with specs"
        )
    if isinstance(data_or_spec, tf.data.Dataset):
        source = from_dataset(data_or_spec, options)
        source.close()
        return source, source.rows
    rows = as_rows(data_or_spec, or_specs=True)
    return rows, rows.count


def explain_call(program: Program, data_or_spec: Any) -> Plan:
    """Return the plan of a call. It traces the function if no call did so before."""
    options = program.options
    data, count = specs_and_count(data_or_spec, options)
    chunks = options.needs_chunks or not isinstance(data, Rows)
    compiled = program.compiled_for(data)
    traced = compiled.traced
    unknown = [Shard(slot, 0, 0) for slot in compiled.slots]  # a shard for each slot
    shards = () if chunks else unknown if count is None else compiled.shards(count)[0]
    used = compiled.devices if chunks else tuple(dict.fromkeys(shard.device for shard in shards))
    flights, gpus = in_flight(compiled, options.prefetch), program.gpus

    def plan_of(device: str) -> DevicePlan:
        own = [len(shard) for shard in shards if shard.device == device]
        if chunks:
            return DevicePlan(device, None, None, flights.get(device, 0), gpus.get(device))
        return DevicePlan(device, None if count is None else sum(own), len(own), None, gpus.get(device))

    return Plan(
        name=program.name,
        engine="chunks" if chunks else "one graph",
        rows=count,
        batch_size=options.batch_size if chunks else None,
        devices=tuple(map(plan_of, program.devices)),
        batched=options.batched,
        vectorized=traced.vectorized,
        reason=traced.reason,
        remedy=traced.remedy,
        traces=compiled.traces,
        captured=captured_by(traced, program.fn, used),
        python_ops=traced.audit.python_ops,
        fixed_seeds=traced.audit.random_ops if compiled.keeps_seeds else (),
        on_error=options.on_error,
        bytes_per_row=_bytes_per_row(tf.nest.flatten(data.specs)),
        result_bytes_per_row=_bytes_per_row(traced.specs),
    )


def _bytes_per_row(specs: Iterable[Any]) -> int | None:
    """Return the bytes of one row of all leaves; `None` if their shapes do not determine them."""
    sizes = [_size_of(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else None for spec in specs]
    return None if None in sizes else sum(size or 0 for size in sizes)


def captured_by(traced: Traced, fn: Callable[..., Any], devices: Sequence[str]) -> tuple[CapturedValue, ...]:
    """Return the values that `fn` captures, in the order of its trace. `devices` get rows."""
    names = _names_around(fn)
    found: list[CapturedValue] = []
    for handle, treatment in zip(traced.captures, traced.audit.treatments):
        variable = variable_of(traced.concrete, handle) if treatment is not None else None
        thing = handle if variable is None else variable
        home = home_of(handle) if variable is None else variable.device
        own_name = "" if variable is None else str(variable.name).partition(":")[0]
        name = own_name if own_name not in _UNNAMED else names.get(id(thing)) or own_name
        handling = _HANDLINGS[treatment]
        if treatment is Treatment.READ and variable is None:  # a lookup table
            handling = Handling.LOOKED_UP
        if {*devices} <= {home} and handling in (Handling.COPIED, Handling.KEPT, Handling.LOOKED_UP):
            handling = Handling.IN_PLACE
        line = writing_line(traced.user_function.graph, handle) if handling is Handling.ORDERED else None
        size = _size_of(thing.shape, thing.dtype) if thing.dtype != tf.resource else None
        found.append(CapturedValue(name or f"capture {len(found) + 1}", size, home, handling, line))
    return tuple(found)


def _names_around(fn: Any) -> dict[int, str]:
    """Return the names of variables, tensors and resources that `fn` can see, by identity.

    `fn` can see globals, closure variables, attributes of these and of a method's object, and closures of functions among
    them.
    """
    owner = getattr(fn, "__self__", fn)
    function = fn if inspect.isroutine(getattr(fn, "python_function", fn)) else type(fn).__call__
    seen = _closure_of(function)
    inner = (entry for value in seen.values() for entry in _closure_of(value).items())
    attributes = (entry for name, value in seen.items() for entry in _attributes(f"{name}.", value))
    names = [*inner, *attributes, *_attributes("", owner), *seen.items()]
    return {id(_captured(value)): name for name, value in names}  # the last name of a value counts


def _closure_of(fn: Any) -> Mapping[str, Any]:
    """Return the globals and closure variables that a Python function uses, except modules; nothing for other values."""
    fn = getattr(fn, "python_function", fn)
    with suppress(TypeError, ValueError):  # not Python code, or a cell that is still empty
        seen = inspect.getclosurevars(inspect.unwrap(fn))
        return {
            name: value for name, value in {**seen.globals, **seen.nonlocals}.items() if not inspect.ismodule(value)
        }
    return {}


def _attributes(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    for name, entry in (value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).items():
        yield f"{prefix}{str(name).lstrip('_')}", entry


def _captured(value: Any) -> Any:
    """Return the object that a graph captures of a value: the state of a generator, or the handle of a table."""
    return value.state if isinstance(value, tf.random.Generator) else getattr(value, "resource_handle", value)


def _size_of(shape: Any, dtype: Any) -> int | None:
    """Return the bytes of a tensor, or of one row if the first dimension is unknown; `None` if the size is unknown.

    >>> _size_of(tf.TensorShape([None, 3]), tf.float32), _size_of(tf.TensorShape([None]), tf.string)
    (12, None)
    """
    if shape.rank is None or dtype in (tf.string, tf.resource, tf.variant):
        return None
    inner = shape[1:] if shape.rank and shape[0] is None else shape
    elements = inner.num_elements()
    return None if elements is None else int(elements) * int(dtype.size)
