"""parallel_map and DeviceMap: what users call. How rows travel is in `run/calls.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import tensorflow as tf

from devicemap.base.structure import as_nodes, as_objects, nodes_of, tuples_for_lists
from devicemap.compile.cache import Memory
from devicemap.compile.program import Program
from devicemap.compile.reduction import Reduction
from devicemap.data.rows import as_rows
from devicemap.data.streams import as_dataset
from devicemap.errors import DataError
from devicemap.events import Event, short_name
from devicemap.run.mapper import Mapper
from devicemap.store.results import Results, open_results
from devicemap.store.write import reduce, write
from devicemap.tell.plan.plan import Plan
from devicemap.tell.plan.planner import explain_call
from devicemap.tell.plan.request import ask
from devicemap.tell.report.recorder import Observers
from devicemap.tell.report.report import Report
from devicemap.tell.verify import Verification, verify

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def _as_written(function: CallableT) -> CallableT:
    """The function as it is also where a `tf.function` calls it: autograph is for `fn`, which gets a context of its own."""
    return cast(CallableT, tf.autograph.experimental.do_not_convert(function))


def parallel_map(
    fn: Callable[..., Any],
    data: Any,
    *others: Any,
    devices: Any = None,
    batched: bool = False,
    vectorize: bool | str = "auto",
    batch_size: int | str | None = None,
    seed: int | None = None,
    fn_output_signature: Any = None,
    jit_compile: bool = False,
    in_place: Any = (),
    output_device: Any = "/CPU:0",
    deterministic: bool = True,
    prefetch: int | None = None,
    max_retries: int = 2,
    progress: bool | Callable[[Event], Any] = False,
    name: str | None = None,
    **unknown: Any,
) -> Any:
    """Map `fn` over the rows of `data` on several devices at once.

    The result is that of `tf.map_fn(fn, data)`, or of `fn(data)` with `batched=True`, to rounding: same rows, order,
    structure and dtypes, on any number of devices. Calling it again with the same `fn` (or the same method of the same
    object) and options does not trace again, as long as `fn` is among the last 64 that were mapped; a `DeviceMap` has no such
    limit. When you drop `fn`, its compiled code and its copies on devices go with the next garbage collection.

    Args:
        fn: takes one row and returns its result, or with `batched=True` takes a batch of rows and returns as many. A tuple
            in `data` is passed as several arguments, a dict or named tuple as one.
        data: a nest of tensors, arrays, lists, `RaggedTensor`s or `SparseTensor`s of shape `[rows, ...]`, or a
            `tf.data.Dataset` of samples (`batched=False`) or of batches of rows (`batched=True`). Objects are structure as
            for `tf.nest`, and so are `tf.experimental.ExtensionType`s: `fn` gets one of the same class that holds a row, or
            a batch.
        devices: `None` for every local GPU, else every local CPU; a kind (`"GPU"`); or a list of names (`"GPU:1"`,
            `"/device:GPU:1"`, full names) or logical or physical devices.
        batched: whether `fn` takes a batch.
        vectorize: how a `fn` of one row runs over the rows of a device: `True` as `tf.vectorized_map`, `False` as
            `tf.map_fn`, `"auto"` as the first if every op was tested to give the same and the results are dense, else as the
            second.
        batch_size: rows per device call. An int: data goes in chunks of that many rows, each to the first idle device; batches
            of a dataset are cut to it. `"auto"`: in chunks of a size that is measured for each device. `None`: a dataset's batches go as they are, its
            samples as with `"auto"`; data in memory goes as one shard per device in short calls and under a tape, and in chunks
            of a measured size in others.
        seed: an int from 0 to 2**32 - 1: `fn` also gets `seed=`, a seed for `tf.random.stateless_*` (int32 `[2]`;
            `[rows, 2]` when batched) that depends on `seed` and the row's index alone.
        fn_output_signature: as in `tf.map_fn`, for a `fn` of one row whose dense results differ in shape. Where it has a list,
            `fn` returns a list of results, not one tensor.
        jit_compile: compile with XLA, once for each number of rows of a shard. Chunks have `batch_size` rows, or 1, 2,
            4, 8, ... with `"auto"`.
        in_place: variables that `fn` reads where they are, for instance a table that is larger than the memory of a device:
            what is looked up travels. Others are copied to each device once per call, or per job in chunks.
        output_device: where results are gathered.
        deterministic: for streams. `True`: chunks in input order; `False`: as they finish, each as `(first row, chunk)`.
        prefetch: chunks in flight per device, so that copying in, computing and copying out overlap. `None`: 2 on CPUs, 4 on
            other devices.
        max_retries: how often a chunk that failed with a transient error of a device is tried again, on another device if
            there is one. Side effects of `fn` may then happen again. A call in one graph is not retried: its first error is
            raised, unless it runs out of memory and continues in chunks. 0: the first error is raised, also if a device
            runs out of memory, which otherwise gets smaller chunks. A device that fails three times in a row gets no more
            chunks in the call, with a `RuntimeWarning`.
        progress: a progress bar; or a callable that gets each `devicemap.types.Event` of the call, one at a time.
        name: a name for the ops and errors of this map.

    Returns:
        The nest that `fn` returns, of tensors of shape `[rows, ...]` on `output_device`. Lists in it become tensors; what an
        extension type holds besides tensors is as it was when `fn` was traced.

    Raises:
        OptionError, DataError: before anything runs, for options and data that are not valid.
        FunctionError: `fn` failed; it names the device and rows, and is an instance of the original error's class too.

    Examples:
        >>> parallel_map(lambda row: tf.reduce_sum(row), tf.reshape(tf.range(6), [3, 2])).numpy()
        array([1, 5, 9], dtype=int32)
    """
    options = dict(
        devices=devices, batched=batched, vectorize=vectorize, batch_size=batch_size, seed=seed,
        fn_output_signature=fn_output_signature, jit_compile=jit_compile, in_place=in_place, output_device=output_device,
        deterministic=deterministic, prefetch=prefetch, max_retries=max_retries, progress=progress, name=name,
        **unknown,
    )  # fmt: skip
    return _mapper_of(fn, options)(data, *others)


def parallel_reduce(
    fn: Callable[..., Any],
    data: Any,
    reducer: Any,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Map `fn` over the rows of `data` on several devices at once, and reduce the results where they are computed.

    The result is that of `tf.reduce_sum(parallel_map(fn, data), 0)`, or of the mean, minimum or maximum, to rounding that does
    not grow with the number of rows. The mapped rows are neither kept nor sent: only a result is, for each device or chunk.

    Args:
        fn: as for `parallel_map`; its results are dense.
        data: as for `parallel_map`; of any length where it is a dataset.
        reducer: "sum", "mean", "min" or "max", for all that `fn` returns or in a nest as `fn` returns one; or a
            `devicemap.Reducer`.
        directory: keep the partial result of each finished chunk there; run again, it computes only what is missing, as
            `DeviceMap.write` does. The same data, `fn` and reducer are expected again; a `Reducer` may finish in another way.
        **options: those of `parallel_map`. `deterministic` makes no difference: results are merged in the order of rows.

    Returns:
        The nest that `fn` returns for one row, with each tensor reduced over the rows, on `output_device`; without rows, what
        TensorFlow's op gives. Or what the `Reducer` finishes with. "sum" and "mean" of data in memory without `batch_size` are
        differentiable.

    Raises:
        OptionError, DataError: before anything runs, for options, a reducer and data that are not valid.
        FunctionError: `fn` failed, or its results cannot be reduced so.
        JournalError: the directory holds something else, or the disk failed: as of `DeviceMap.write`.

    Examples:
        >>> int(parallel_reduce(lambda row: tf.reduce_sum(row), tf.reshape(tf.range(6), [3, 2]), "max"))
        9
    """
    return _mapper_of(fn, {"progress": False, **options}).reduce(data, reducer, directory)


class DeviceMap:
    """A function mapped over devices: compiled once for each structure of data, reusable, thread-safe.

    The options are those of `parallel_map`.

    Examples:
        >>> mapper = DeviceMap(lambda x, y: {"sum": x + y})
        >>> mapper((tf.range(3), tf.range(3)))["sum"].numpy()
        array([0, 2, 4], dtype=int32)
    """

    def __init__(self, fn: Callable[..., Any], **options: Any):
        self._take(Program(fn, options))

    def _take(self, program: Program) -> None:
        self._program = program
        self._observers = Observers(program.name, program.options, program.gpus)
        self._mapper = Mapper(program, self._observers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as what it was made of, which is traced again."""
        return partial(DeviceMap, **vars(self._program.options)), (self._program.fn,)

    def __call__(self, data: Any, *others: Any) -> Any:
        """Map over all of `data`; see `parallel_map` for what it may be and what comes back."""
        if others:
            count = 1 + len(others)
            raise DataError(
                f"data came as {count} arguments; pass a tuple of {count}, as in (x, y). Options have names"
            )
        if not tf.executing_eagerly():
            return _inside_function(self._mapper, data)
        return self._mapper.run(data)

    def reduce(self, data: Any, reducer: Any, directory: str | os.PathLike[str] | None = None) -> Any:
        """Map over all of `data`, and reduce the results where they are computed; see `parallel_reduce`.

        Examples:
            >>> int(DeviceMap(lambda n: n * n).reduce(tf.range(4), "sum"))
            14
        """
        mapper = Mapper(self._program.reducing(Reduction(reducer)), self._observers)
        if directory is not None:
            return reduce(mapper, data, directory)
        return mapper.run(data) if tf.executing_eagerly() else _inside_function(mapper, data)

    def stream(self, data: Any) -> Iterator[Any]:
        """Map over `data` chunk by chunk, in memory bounded by what is in flight, however long the data is.

        Args:
            data: as for `parallel_map`; a dataset may be infinite.

        Returns:
            A generator of chunks, nests of tensors of shape `[rows of the chunk, ...]`. Those of a dataset of batches are
            its batches, cut to `batch_size` if given; those of everything else have `batch_size` rows, or with
            `batch_size=None` or `"auto"` as many as pay. With `deterministic=False` they come as they finish, each as
            `(first row, chunk)`. Nothing is read before the first chunk is asked for; closing or dropping the generator
            stops everything.

        Raises:
            OptionError, DataError: at once.
            FunctionError: as soon as `fn` fails. Errors of the dataset are raised after the chunks before them.

        Examples:
            >>> mapper = DeviceMap(lambda n: n * n, batch_size=2)
            >>> [chunk.numpy().tolist() for chunk in mapper.stream(tf.range(5))]
            [[0, 1], [4, 9], [16]]
        """
        return self._mapper.stream(data)

    def as_dataset(self, data: Any) -> tf.data.Dataset:
        """The chunks of `stream(data)` as a `tf.data.Dataset`, for instance for `model.fit`.

        Its elements are as `stream` yields them, of shape `[None, ...]`. Each iteration over it maps anew, so use
        `.cache()` to keep the results of the first. Mapper and data live as long as the dataset, datasets made of it, and
        iterators over them.

        Examples:
            >>> dataset = DeviceMap(lambda n: n * n, batch_size=2).as_dataset(tf.range(5))
            >>> dataset.element_spec
            TensorSpec(shape=(None,), dtype=tf.int32, name=None)
            >>> [n.item() for n in dataset.unbatch().as_numpy_iterator()]
            [0, 1, 4, 9, 16]
        """
        spec, count = self._mapper.shape_of_stream(data)
        if not nodes_of(spec):
            return as_dataset(lambda: self.stream(data), spec, count)

        def leaves() -> Iterator[Any]:  # from_generator knows no structure but tuples and dicts
            return (tuple(tf.nest.flatten(as_nodes(chunk))) for chunk in self.stream(data))

        spec = tuples_for_lists(spec)
        dataset = as_dataset(leaves, tuple(tf.nest.flatten(spec)), count)
        return dataset.map(_as_written(lambda *leaves: as_objects(tf.nest.pack_sequence_as(spec, leaves))))

    @property
    def report(self) -> Report | None:
        """What happened in the last call that has finished: rows, times, devices, retries; `None` before the first.

        Calls inside a `tf.function` of the user are not reported.

        Examples:
            >>> mapper = DeviceMap(lambda n: n * n)
            >>> _ = mapper(tf.range(100))
            >>> mapper.report.rows, mapper.report.way
            (100, 'one graph')
        """
        return None if self._observers.last is None else self._observers.last.report()

    def write(
        self,
        data: Any,
        directory: str | os.PathLike[str],
        *,
        trust_function: bool = False,
    ) -> Results:
        """Map over `data`, and keep each finished chunk on disk; run again, it computes only what is missing.

        Killed at any moment, also by a full disk, it loses at most the chunks that were in flight. A chunk that is
        damaged or half written is computed again. The directory may be anybody's: it is read as such.

        Args:
            data: as for `parallel_map`; the same again when it is run again, which is checked.
            directory: a new or empty one, or one that an earlier run of the same call has left.
            trust_function: continue although other code of `fn` computed the results in the directory, because the difference
                does not affect them. Variables that `fn` captures must be the same, in the same order.

        Returns:
            What the directory holds, as `devicemap.open_results(directory)` does.

        Raises:
            JournalError: the directory holds something else, or results of other data, of another call or of another function.
                Functions are compared by their graphs and by the values of the variables that they read. Or another process
                writes to the directory. In these cases, nothing in it has been changed. Or the disk failed.

        Warns:
            RuntimeWarning: the directory holds results already, and `fn` calls Python code (`tf.py_function`) or uses tables,
                datasets or iterators. Changes of these are not detected.

        Examples:
            >>> import tempfile
            >>> directory = tempfile.mkdtemp()
            >>> results = DeviceMap(lambda n: n * n, batch_size=2).write(tf.range(5), directory)
            >>> results.load()
            array([ 0,  1,  4,  9, 16], dtype=int32)
        """
        write(self._mapper, data, directory, trust_function)
        return open_results(directory)

    def verify(
        self, data: Any, rows: int | None = None, *, tolerance: float | None = None, seconds: float | None = 30.0
    ) -> Verification:
        """Run `fn` on some rows in three modes, and compare the results with those of one device.

        The modes are: "again" (one device, all rows at once), "one by one" (one row per call) and "over devices". `fn` runs
        several times on each row, and so do its side effects. The variables that it writes keep the new values. In a
        terminal, a verification of more than a few seconds shows a progress bar.

        Args:
            data: as for `parallel_map`; the first rows are taken.
            rows: how many; `None` for two per device, and at least 16.
            tolerance: the allowed difference of numbers with a fraction, relative to the largest number of their output.
                `None`: half of the digits of their dtype have to agree. Everything else has to be equal.
            seconds: the time limit, without the trace; `None` for none. A slow `fn` is verified on fewer rows, at least 2. Runs
                on one device stop at the limit, and the map over the devices starts only if it is likely to finish.

        Returns:
            A `Verification` with `ok` and the findings; print it. `ok` is false if a mode did not finish in time.

        Raises:
            OptionError, DataError: before anything runs.
            FunctionError: `fn` fails on all rows at once, or over the devices. A failure in another mode is a finding.

        Warns:
            RuntimeWarning: the time limit left out rows or modes.

        Examples:
            >>> mapper = DeviceMap(lambda batch: batch - tf.reduce_mean(batch), batched=True)
            >>> verification = mapper.verify(tf.range(6.0), rows=6)
            >>> verification.ok, verification.findings[0].mode
            (False, 'one by one')
        """
        return verify(self._program, data, rows, tolerance, seconds)

    def explain(self, data_or_spec: Any, reducer: Any = None) -> Plan:
        """What a call would do, and what stands in the way of parallelism, without running `fn`.

        `fn` is traced, and graphs are built, as a call would; a later call does neither again.

        Args:
            data_or_spec: data as for `parallel_map`, or a nest of `tf.TypeSpec`s in its place; `None` rows are unknown.
            reducer: that of a `reduce`, to explain this in place of a call.

        Raises:
            DataError, OptionError: as a call; also inside a `tf.function`.
            FunctionError: `fn` cannot be traced.

        Examples:
            >>> plan = DeviceMap(lambda n: n * n, devices=["CPU:0"], batch_size=2).explain(tf.TensorSpec([5], tf.int32))
            >>> plan.rows, plan.way, plan.vectorized
            (5, 'chunks', True)
        """
        program = self._program if reducer is None else self._program.reducing(Reduction(reducer))
        asked = ask(data_or_spec, program.options)
        compiled = program.compiled_for(asked)
        return explain_call(asked, compiled, program.options, program.fn, program.devices, program.name)

    def __repr__(self) -> str:
        return f"DeviceMap({self._program.name}, devices={[short_name(device) for device in self._program.devices]})"


@_as_written
def _inside_function(mapper: Mapper, data: Any) -> Any:
    return mapper.in_chunks(data) if isinstance(data, tf.data.Dataset) else mapper.inside_function(as_rows(data))


_remembered = Memory()


@_as_written
def _mapper_of(fn: Callable[..., Any], options: dict[str, Any]) -> DeviceMap:
    """A mapper for one call, which shares what it compiles with earlier calls of the same `fn` and options."""
    mapper = object.__new__(DeviceMap)
    mapper._take(_remembered.program_of(fn, options))
    return mapper
