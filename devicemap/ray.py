"""`map_batches` and `reduce`: a Ray Data dataset mapped on the hosts of a Ray cluster, by actors that hold a `DeviceMap` each.

    blocks ── Ray: where, how often, once more after a failure ──> an actor ── DeviceMap: its devices ──> blocks

What Ray does is left to it. A row's random numbers depend on its number alone, so numbers travel with the rows.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.base.options import check_count, check_options
from devicemap.compile.program import Program
from devicemap.compile.reduction import BoundReduction, Reduction
from devicemap.compile.seeds import seeds_of_rows
from devicemap.errors import DataError, DeviceMapError, OptionError, failure
from devicemap.run.calls import Calls, Nobody

RESULT = "result"
"""The column of results that are no dicts."""

_NUMBER = "devicemap.row"
"""The column of the rows' numbers."""

_KIND = "kind"
"""The column that tells what states are of."""

_CHUNKS = 16
"""In what Ray hands to an actor at a time where it has to be told: enough that few of them wait for the next ones."""


def map_batches(
    dataset: Any,
    fn: Callable[..., Any],
    *,
    concurrency: int | tuple[int, int],
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    **options: Any,
) -> Any:
    """Map `fn` over the rows of a Ray Data dataset, on the devices of many hosts.

    Actors of Ray's hold one `DeviceMap` each, over all the GPUs that Ray gives them, else over the CPU of their host. Ray hands
    them blocks, moves an actor that is lost with its host, and does its blocks again; so what `fn` does besides returning may
    happen again.

    Args:
        dataset: a `ray.data.Dataset`.
        fn: as for `parallel_map`. It gets a dict of columns: of one row, or with `batched=True` of a batch, of shapes
            `[rows, ...]`. Columns whose rows differ in their first axis alone are ragged, text is a string tensor. It is
            pickled, with the variables in it: each actor has its own.
        concurrency: how many actors, or the fewest and the most of them.
        num_gpus: GPUs of each actor. With GPUs, Ray asks for a size of batches: `batch_size` has to be an int.
        num_cpus: CPUs that Ray sets aside for each actor; 1 where neither is given. TensorFlow does not keep to them.
        **options: those of `parallel_map`; `devices` are those of an actor's host. With a `seed`, the dataset is computed
            now, in order, and kept in Ray's object store, twice while rows get their numbers; results come in order then.

    Returns:
        A lazy `ray.data.Dataset` whose columns are the dict that `fn` returns, or "result" where it returns one tensor. Without
        a `seed`, its blocks come as they finish, unless `dataset.context.execution_options.preserve_order` was set.

    Raises:
        DeviceMapError: Ray is not installed.
        OptionError, DataError: before anything runs, for options and data that cannot be.
        ray.exceptions.RayTaskError: when the result is read: `fn` failed. Its message ends with that of the `FunctionError`.
    """
    return _by_actors(dataset, fn, _mapper, concurrency, num_gpus, num_cpus, options)


def reduce(
    dataset: Any,
    fn: Callable[..., Any],
    reducer: Any,
    *,
    concurrency: int | tuple[int, int],
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    **options: Any,
) -> Any:
    """Map `fn` over the rows of a Ray Data dataset, and reduce the results where they are computed.

    What travels is a state for each block, of the size of the result. States are merged here, in the order of rows. Arguments
    are those of `map_batches`, and the `reducer` of `devicemap.parallel_reduce`.

    Returns:
        What `devicemap.parallel_reduce` gives.

    Raises:
        DeviceMapError: Ray is not installed.
        OptionError, DataError: before anything runs, for options, a reducer and data that cannot be; and for no rows at all.
        ray.exceptions.RayTaskError: `fn` failed, or its results cannot be reduced so.
    """
    reduction = Reduction(reducer)
    states = _by_actors(dataset, fn, partial(_States, reducer), concurrency, num_gpus, num_cpus, options)
    with _in_order(states):
        blocks = list(states.iter_batches(batch_size=None, batch_format="numpy"))
    if not blocks:
        raise DataError("the dataset has no rows, and nothing else tells what fn returns")
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    bound = reduction.of(*pickle.loads(columns.pop(_KIND)[0]))
    return bound.packed(bound.finished([columns[str(i)] for i in range(len(columns))]))


def _by_actors(
    dataset: Any,
    fn: Callable[..., Any],
    make: Callable[..., Any],
    concurrency: int | tuple[int, int],
    num_gpus: float | None,
    num_cpus: float | None,
    options: dict[str, Any],
) -> Any:
    """The dataset that actors make of another one by what `make(fn, options)` gives them."""
    ray = _ray()
    if not isinstance(dataset, ray.data.Dataset):
        raise DataError(
            f"dataset is of type {type(dataset).__name__}; expected a ray.data.Dataset, as of ray.data.read_parquet"
        )
    sizes = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    if len(sizes) != 2:
        raise OptionError(
            f"concurrency={concurrency!r}; expected a number of actors, or the fewest and the most of them"
        )
    for size in sizes:
        check_count("concurrency", size)
    checked = check_options(fn, options)
    rows = None
    if num_gpus:
        if not isinstance(checked.batch_size, int):
            raise OptionError(
                f"batch_size={checked.batch_size!r} with num_gpus; expected an int, in rows per device call"
            )
        rows = checked.batch_size * _CHUNKS
    seed = options.pop("seed", None)
    if seed is not None:
        options["name"] = checked.name or getattr(fn, "__name__", type(fn).__name__)
        dataset, fn = _numbered(dataset), partial(_with_seed, fn)
    return dataset.map_batches(
        _Actor,
        fn_constructor_args=(partial(make, fn, options), seed),  # as one: variables in both are the same
        compute=ray.data.ActorPoolStrategy(min_size=sizes[0], max_size=sizes[1]),
        batch_size=rows,
        batch_format="numpy",
        num_gpus=num_gpus,
        num_cpus=num_cpus,
    )


def _mapper(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    return DeviceMap(fn, **options)


class _States:
    """Rows -> the columns of a state of them."""

    def __init__(self, reducer: Any, fn: Callable[..., Any], options: dict[str, Any]):
        self._calls = Calls(Program(fn, options).reducing(_Unfinished(reducer)), Nobody())

    def __call__(self, data: Any) -> Any:
        return self._calls.over(data)


class _Unfinished(Reduction):
    """A reduction that ends with the columns of a state, the last of which tells how to finish it."""

    def of(self, structure: Any, specs: Sequence[Any]) -> BoundReduction:
        bound = super().of(structure, specs)
        kind = pickle.dumps((structure, specs))

        def packed(leaves: Sequence[Any]) -> dict[str, Any]:
            return {**{str(i): leaf for i, leaf in enumerate(leaves)}, _KIND: tf.constant([kind])}

        bound.finished = lambda states: bound.merged([states])  # type: ignore[method-assign]
        bound.packed = packed  # type: ignore[method-assign]
        return bound


class _Actor:
    """What an actor of Ray's holds."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], seed: int | None):
        self._run = make()
        self._seed = seed

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        data: Any = {name: _rows_of(name, column) for name, column in block.items() if name != _NUMBER}
        if self._seed is not None:
            data = data, seeds_of_rows(self._seed, block[_NUMBER])
        result = self._run(data)
        columns = result if isinstance(result, Mapping) else {RESULT: result}
        for name, column in columns.items():
            if not isinstance(name, str) or not isinstance(column, tf.Tensor | tf.RaggedTensor):
                raise failure(
                    f"fn returns {columns!r}; expected a dict of columns, dense or ragged, or one such tensor"
                )
        return {name: column.numpy() for name, column in columns.items()}


def _with_seed(fn: Callable[..., Any], columns: Any, seed: Any) -> Any:
    return fn(columns, seed=seed)


def _rows_of(name: str, column: Any) -> Any:
    """A column of a block as rows: Ray has those of different shapes as an array of arrays, and text as one of objects."""
    if column.dtype != object or not len(column) or isinstance(column[0], str | bytes):
        return column
    rows = [np.asarray(row) for row in column]
    if len({(row.dtype, row.shape[1:]) for row in rows}) > 1 or not rows[0].shape or rows[0].dtype == object:
        raise DataError(
            f"column {name!r} has rows that are no arrays, or differ in more than the length of their first axis"
        )
    return tf.RaggedTensor.from_row_lengths(np.concatenate(rows), [len(row) for row in rows])


def _numbered(dataset: Any) -> Any:
    """The dataset with a column of the rows' numbers, in Ray's object store."""
    ray = _ray()
    with _in_order(dataset):
        tables = dataset.materialize().to_arrow_refs()
    count, number = ray.remote(lambda table: len(table)), ray.remote(_number)
    ends = np.cumsum([0, *ray.get([count.remote(table) for table in tables])])
    numbered = ray.data.from_arrow_refs([number.remote(table, first) for table, first in zip(tables, ends)])
    numbered.context.execution_options.preserve_order = True
    return numbered


@contextlib.contextmanager
def _in_order(dataset: Any) -> Iterator[None]:
    """What is computed of the dataset inside comes in order. Datasets have their own copy of Ray's context."""
    options = dataset.context.execution_options
    kept, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = kept


def _number(table: Any, first: int) -> Any:
    return table.append_column(_NUMBER, [np.arange(first, first + len(table))])


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise DeviceMapError("devicemap.ray needs Ray Data, which is not installed: pip install 'ray[data]'") from error
    return ray
