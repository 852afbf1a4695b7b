"""`map_batches` and `reduce`: maps over a Ray Data dataset by actors on the hosts of a Ray cluster, each with a `DeviceMap`.

    blocks ── Ray: placement, scaling, retries ──> an actor ── DeviceMap: its devices ──> blocks

The random numbers of a row depend only on its number, so the dataset gets a column of row numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.compile.reduction import Reduction
from devicemap.data.structure import freeze
from devicemap.errors import DataError, DeviceMapError, OptionError, failure
from devicemap.options import check_count, check_options
from devicemap.ray.actors import NUMBER, STATE, Actor, pickled

_CHUNKS = 16
"""The chunks in a batch that Ray sends to an actor with GPUs. With this number, actors seldom wait for the next batch."""


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

    Each actor has a `DeviceMap` over all GPUs that Ray assigns to it, or otherwise over the CPU of its host. Ray sends blocks
    to the actors. If a host is lost, Ray restarts its actors elsewhere and maps their blocks again, with the side effects of
    `fn`.

    Args:
        dataset: a `ray.data.Dataset`.
        fn: as for `parallel_map`. It gets a dict of columns of one row, or with `batched=True` of a batch, of shapes
            `[rows, ...]`. Lists, and tensors that differ only in their first axis, are ragged. Text is a string tensor. `fn`
            is pickled with its variables, so each actor has its own variables.
        concurrency: the number of actors, or the smallest and the largest number.
        num_gpus: GPUs of each actor. With GPUs, Ray requires a size of batches, so `batch_size` has to be an int.
        num_cpus: CPUs that Ray reserves for each actor; 1 if neither is given. TensorFlow may use other CPUs, too.
        **options: those of `parallel_map`. `devices` are devices of an actor's host. Ray shows a bar of its own. A callable
            `progress` is pickled and gets the events in each actor. With a `seed`, the dataset is computed at once, in order,
            and stored in Ray's object store, twice while rows get their numbers. Results are then in order.

    Returns:
        A lazy `ray.data.Dataset` whose columns are the dict that `fn` returns, or "result" if it returns one tensor. Without a
        `seed`, blocks are in the order in which they finish, unless `dataset.context.execution_options.preserve_order` is set.

    Raises:
        DeviceMapError: Ray is not installed.
        OptionError, DataError: before anything runs, for invalid options and data.
        ray.exceptions.RayError: when the result is read, because `fn` failed, a column cannot be converted, or an actor lacks
            the devices. Its message contains that of the `FunctionError`, `DataError` or `DeviceError`.

    Examples:
        Images to features, on two actors with a GPU each:

            images = ray.data.read_binary_files("images", include_paths=True)
            features = devicemap.ray.map_batches(images, describe, concurrency=2, num_gpus=1, batch_size=64)
            features.write_parquet("features")
    """
    return _by_actors(dataset, fn, None, concurrency, num_gpus, num_cpus, options)


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
    """Map `fn` over the rows of a Ray Data dataset, and reduce the results in the actors.

    Each actor sends a state for each block, of the size of the result. This process merges the states as they arrive, in the
    order of rows, and keeps few of them. Arguments are those of `map_batches`, and `reducer` as for
    `devicemap.parallel_reduce`.

    Returns:
        The result, as of `devicemap.parallel_reduce`.

    Raises:
        DeviceMapError: Ray is not installed.
        OptionError, DataError: before anything runs, for invalid options, reducers and data. `DataError` also without rows.
        FunctionError: `fn` returns results of other dtypes or shapes for some blocks.
        ray.exceptions.RayError: as for `map_batches`, and if the results of `fn` cannot be reduced by the reducer.

    Examples:
        The mean of each pixel:

            images = ray.data.read_images("images", size=(64, 64))
            devicemap.ray.reduce(images, lambda row: tf.cast(row["image"], tf.float32), "mean", concurrency=2)
    """
    reduction = Reduction(reducer)
    states = _by_actors(dataset, fn, reducer, concurrency, num_gpus, num_cpus, options)
    blocks = _in_order(states).iter_batches(batch_size=None, batch_format="numpy")
    found = (pickle.loads(state) for block in blocks for state in block[STATE])
    first = next(found, None)
    if first is None:
        raise DataError("the dataset has no rows, so what fn returns is unknown; pass a dataset with at least one row")
    structure, specs, _ = first
    bound, wanted = reduction.of(structure, specs), _dtypes(structure, specs)

    def checked() -> Iterator[Any]:
        for structure, specs, state in chain([first], found):
            results = _dtypes(structure, specs)
            if freeze(results) != freeze(wanted):
                raise failure(
                    f"fn returns {wanted} for the first block, but {results} for another one; cast its results in fn"
                )
            yield state

    return bound.pack_result(bound.finish_state(bound.merge_stream(checked(), "/CPU:0") or []))


def _dtypes(structure: Any, specs: Sequence[Any]) -> Any:
    return tf.nest.pack_sequence_as(structure, [spec.dtype.name for spec in specs])


def _by_actors(
    dataset: Any,
    fn: Callable[..., Any],
    reducer: Any,
    concurrency: int | tuple[int, int],
    num_gpus: float | None,
    num_cpus: float | None,
    options: dict[str, Any],
) -> Any:
    """Return a dataset of mapped rows, or with a reducer of states, which actors compute from another one."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise DeviceMapError("devicemap.ray needs Ray Data, which is not installed: pip install 'ray[data]'") from error
    if not isinstance(dataset, ray.data.Dataset):
        raise DataError(
            f"dataset is of type {type(dataset).__name__}; expected a ray.data.Dataset, as of ray.data.read_parquet"
        )
    sizes = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    for size in sizes:
        check_count("concurrency", size)
    if len(sizes) != 2 or sizes[0] > sizes[1]:
        raise OptionError(
            f"concurrency={concurrency!r}; expected a number of actors, or the fewest and the most of them"
        )
    checked = check_options(fn, options)
    if checked.skips:
        raise OptionError("on_error='skip' on Ray, which has no report of failed rows; let fn mark such rows")
    rows = None
    if num_gpus:
        if not isinstance(checked.batch_size, int):
            raise OptionError(
                f"batch_size={checked.batch_size!r} with num_gpus; expected an int, in rows per device call"
            )
        rows = checked.batch_size * _CHUNKS
    if checked.progress is True:  # Ray shows a bar for all actors
        del options["progress"]
    seed = options.pop("seed", None)
    if seed is not None:
        options["name"] = checked.name or getattr(fn, "__name__", type(fn).__name__)
        dataset, fn = _numbered(ray, dataset), partial(_with_seed, fn)
    # Pickled together, so that variables in both stay the same. Ray stores an array only once in the memory of a host.
    job = np.frombuffer(pickled((fn, reducer, options)), np.uint8)
    return dataset.map_batches(
        Actor,
        fn_constructor_args=(job, seed, bool(num_gpus)),
        compute=ray.data.ActorPoolStrategy(min_size=sizes[0], max_size=sizes[1]),
        batch_size=rows,
        batch_format="pyarrow",
        num_gpus=num_gpus,
        num_cpus=num_cpus,
    )


def _with_seed(fn: Callable[..., Any], columns: Any, seed: Any) -> Any:
    return fn(columns, seed=seed)


def _numbered(ray: Any, dataset: Any) -> Any:
    """Return the dataset with a column of row numbers, in Ray's object store."""
    ordered = _in_order(dataset)
    tables = ordered.materialize().to_arrow_refs()
    count, number = ray.remote(lambda table: len(table)), ray.remote(_number)
    ends = np.cumsum([0, *ray.get([count.remote(table) for table in tables])])
    numbered = ray.data.from_arrow_refs([number.remote(table, first) for table, first in zip(tables, ends)])
    vars(numbered.context).update(vars(ordered.context))  # from_arrow_refs copies the global context
    return numbered


def _in_order(dataset: Any) -> Any:
    """Return the dataset, in order, with a separate context. Ray's datasets share the context of their source."""
    ordered = dataset.copy(dataset, _deep_copy=True)  # copies the plan and the context, but no rows
    ordered.context.execution_options.preserve_order = True
    return ordered


def _number(table: Any, first: int) -> Any:
    return table.append_column(NUMBER, [np.arange(first, first + len(table))])
