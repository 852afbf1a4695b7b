"""The public functions, and how data flows through them.

DeviceMap(fn, **options) ──> Program            checks the options, and chooses devices
mapper(data)             ──> Mapper.run         traces fn once per structure of data; one graph for all devices, or chunks for
                                                idle devices (`run/mapper.py`)
mapper.stream(data)      ──> Mapper.stream      chunks as they finish, in order
mapper.write(data, dir)  ──> store.write        chunks to disk
mapper.explain(data)     ──> explain_call       the plan of a call, without running it
parallel_map(fn, data)   ──> ProgramCache ──> the same as DeviceMap(fn)(data)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.compile.program import Program, ProgramCache
from devicemap.compile.reduction import Reduction
from devicemap.data.streams import as_dataset
from devicemap.errors import DataError
from devicemap.events import Event, short_name
from devicemap.inspect.plan import Plan
from devicemap.inspect.planner import explain_call
from devicemap.inspect.recorder import Observers
from devicemap.inspect.report import Report
from devicemap.inspect.verify import Verification, verify
from devicemap.run.mapper import Mapper
from devicemap.store.results import Results, open_results
from devicemap.store.write import reduce, write


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
    on_error: str = "raise",
    progress: bool | Callable[[Event], Any] = False,
    name: str | None = None,
    **unknown: Any,
) -> Any:
    """Map `fn` over the rows of `data` on several devices at once.

    The result equals `tf.map_fn(fn, data)`, or `fn(data)` with `batched=True`, up to rounding. Rows, order, structure and
    dtypes are the same on any number of devices. A later call with the same `fn` and options does not trace again, if `fn` is
    among the last 64 functions that were mapped, and the numbers, texts and flags that it uses as global and nonlocal variables
    have not changed. Other Python values keep those of the trace. A method of the same object counts as the same `fn`. A
    `DeviceMap` traces once. Compiled code and replicas of variables are freed with `fn`.

    Args:
        fn: takes one row and returns its result. With `batched=True` it takes a batch of rows, and returns as many. A tuple in
            `data` is passed as several arguments, a dict or named tuple as one.
        data: a nest of tensors, arrays, lists, `RaggedTensor`s or `SparseTensor`s of shape `[rows, ...]`, or a
            `tf.data.Dataset` of samples (`batched=False`) or batches of rows (`batched=True`). Objects that `tf.nest` flattens
            and `tf.experimental.ExtensionType`s are structure. `fn` gets an object of the same class for a row or a batch.
        devices: `None` for all local GPUs, or all local CPUs if there is none; a kind (`"GPU"`); or a list of names
            (`"GPU:1"`, `"/device:GPU:1"`, full names) or logical or physical devices.
        batched: whether `fn` takes a batch.
        vectorize: for a `fn` of one row: `True` as `tf.vectorized_map`, `False` as `tf.map_fn`. `"auto"` vectorises if
            data is dense. Ops without a tested vectorised form then run row by row, or the whole `fn` does.
        batch_size: rows per device call. An int: each chunk of that many rows goes to the first idle device. Batches of a
            dataset are cut to that size. `"auto"`: the size of chunks is measured for each device. `None`: batches of a
            dataset stay whole. Data in memory is cut into one shard per device if the call is short or under a tape. Other
            data is mapped as with `"auto"`.
        seed: an int from 0 to 2**32 - 1. `fn` also gets `seed=`, a seed for `tf.random.stateless_*` (int32 `[2]`, or
            `[rows, 2]` if batched) that depends only on `seed` and the index of the row.
        fn_output_signature: as in `tf.map_fn`, for a `fn` of one row whose dense results differ in shape. For a list in it,
            `fn` returns a list of results, not one tensor.
        jit_compile: compile with XLA, once for each number of rows of a shard. Chunks have `batch_size` rows, or 1, 2, 4,
            8, ... with `"auto"`.
        in_place: variables that `fn` reads on their own device, for instance a table that is larger than the memory of the
            others. Other variables are copied to each device once per call.
        output_device: where results are gathered.
        deterministic: for streams. `True`: chunks in input order; `False`: as they finish, each as `(first row, chunk)`.
        prefetch: chunks in flight per device, so that copies overlap with computing. `None`: 2 on a CPU, or one per core if
            that is more, and 4 on other devices.
        max_retries: how often a chunk that failed with a transient error of a device is tried again, on another device if
            there is one. Side effects of `fn` may then happen again. A call in one graph is not retried, but continues in
            chunks if it runs out of memory. A device that runs out of memory gets smaller chunks. A device that fails three
            times in a row gets no more chunks in the call, with a `RuntimeWarning`. 0: the first error is raised, also for
            lack of memory.
        on_error: "raise": the first error ends the call. "skip": rows that still fail after their retries are left out. The
            results of all other rows are returned in order. A failing chunk is computed in halves on its device until the
            failing rows are known. `report.failed_rows` lists the failed rows. A call without a `DeviceMap` warns of them, and
            `DeviceMap.write` stores them. "skip" is refused under a tape, inside a `tf.function`, and with ordered writes of
            variables.
        progress: `True` for a progress bar, or a callable that gets each `devicemap.types.Event`, one at a time.
        name: a name for the ops and errors of this map.

    Returns:
        The nest that `fn` returns, of tensors of shape `[rows, ...]` on `output_device`. Lists in it become tensors. Parts of
        an extension type that are not tensors have their values from the trace.

    Raises:
        OptionError, DataError: before anything runs, for invalid options or data.
        FunctionError: `fn` failed. It names the device and rows, and is also an instance of the original error's class.

    Warns:
        RuntimeWarning: rows failed and are left out, or a device kept failing and got no more chunks.

    Examples:
        >>> parallel_map(lambda row: tf.reduce_sum(row), tf.reshape(tf.range(6), [3, 2])).numpy()
        array([1, 5, 9], dtype=int32)
    """
    options = dict(
        devices=devices, batched=batched, vectorize=vectorize, batch_size=batch_size, seed=seed,
        fn_output_signature=fn_output_signature, jit_compile=jit_compile, in_place=in_place, output_device=output_device,
        deterministic=deterministic, prefetch=prefetch, max_retries=max_retries, on_error=on_error,
        progress=progress, name=name, **unknown,
    )  # fmt: skip
    return _cached_map(fn, options)(data, *others)


def parallel_reduce(
    fn: Callable[..., Any],
    data: Any,
    reducer: Any,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Map `fn` over the rows of `data` on several devices at once, and reduce the results on these devices.

    The result equals `tf.reduce_sum(parallel_map(fn, data), 0)`, or the mean, minimum or maximum, up to rounding that does not
    grow with the number of rows. Devices send one result per shard or chunk, and do not keep the mapped rows.

    Args:
        fn: as for `parallel_map`; its results are dense.
        data: as for `parallel_map`; a dataset may be larger than memory.
        reducer: "sum", "mean", "min" or "max", for all results of `fn` or in a nest like its result; or a `devicemap.Reducer`.
        directory: store the partial result of each chunk there. The same call again computes only what is missing, as
            `DeviceMap.write` does. A `Reducer` may then have another `finish`.
        **options: those of `parallel_map`. Results are merged in the order of rows whatever `deterministic` is.

    Returns:
        The nest that `fn` returns for one row, with each tensor reduced over the rows, on `output_device`. With a `Reducer`,
        the result of its `finish`. Without rows, the result equals that of TensorFlow's op. "sum" and "mean" of data in memory
        without `batch_size` are differentiable.

    Raises:
        OptionError, DataError: before anything runs, for invalid options, reducers or data.
        FunctionError: `fn` failed, or its results cannot be reduced.
        JournalError: the directory holds other results, or the disk failed: as for `DeviceMap.write`.

    Examples:
        >>> int(parallel_reduce(lambda row: tf.reduce_sum(row), tf.reshape(tf.range(6), [3, 2]), "max"))
        9
    """
    return _cached_map(fn, options).reduce(data, reducer, directory)


class DeviceMap:
    """A function mapped over devices: compiled once for each structure of data, reusable, thread-safe.

    The options are those of `parallel_map`.

    Examples:
        >>> mapper = DeviceMap(lambda x, y: {"sum": x + y})
        >>> mapper((tf.range(3), tf.range(3)))["sum"].numpy()
        array([0, 2, 4], dtype=int32)
    """

    def __init__(self, fn: Callable[..., Any], **options: Any):
        self._bind(Program(fn, options))

    def _bind(self, program: Program, warns_of_rows: bool = False) -> None:
        self._program = program
        self._observers = Observers(program, warns_of_rows)
        self._mapper = Mapper(program, self._observers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the function and the options; a copy traces again."""
        return partial(DeviceMap, **vars(self._program.options)), (self._program.fn,)

    def __call__(self, data: Any, *others: Any) -> Any:
        """Map over all of `data`; `parallel_map` describes the data, the result and the errors."""
        if others:
            count = 1 + len(others)
            raise DataError(
                f"data came as {count} arguments; pass a tuple of {count}, as in (x, y). Options have names"
            )
        return self._mapper.run(data)

    def reduce(self, data: Any, reducer: Any, directory: str | os.PathLike[str] | None = None) -> Any:
        """Map over all of `data`, and reduce the results on the devices; see `parallel_reduce`.

        Examples:
            >>> int(DeviceMap(lambda n: n * n).reduce(tf.range(4), "sum"))
            14
        """
        mapper = self._mapper.reducing(Reduction(reducer))
        if directory is not None:
            return reduce(mapper, data, directory)
        return mapper.run(data)

    def stream(self, data: Any) -> Iterator[Any]:
        """Map over `data` chunk by chunk, in bounded memory.

        Args:
            data: as for `parallel_map`; a dataset may be infinite.

        Returns:
            A generator of chunks: nests of tensors of shape `[rows of the chunk, ...]`. Chunks have `batch_size` rows, or a
            measured size with `None` or `"auto"`. Batches of a dataset are cut to `batch_size` rows, and stay whole with
            `None`. With `deterministic=False`, chunks are in the order in which they finish, each as `(first row, chunk)`.
            Nothing is read before the first chunk is requested. Closing or dropping the generator ends the call.

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
        """Return the chunks of `stream(data)` as a `tf.data.Dataset`, for instance for `model.fit`.

        Its elements are of shape `[None, ...]`. Each iteration maps again; `.cache()` keeps the results of the first. The map
        and the data live as long as the dataset, datasets that derive from it, and their iterators.

        Examples:
            >>> dataset = DeviceMap(lambda n: n * n, batch_size=2).as_dataset(tf.range(5))
            >>> dataset.element_spec
            TensorSpec(shape=(None,), dtype=tf.int32, name=None)
            >>> [n.item() for n in dataset.unbatch().as_numpy_iterator()]
            [0, 1, 4, 9, 16]
        """
        return as_dataset(partial(self.stream, data), *self._mapper.shape_of_stream(data))

    @property
    def report(self) -> Report | None:
        """The report of the last call that finished: rows, times and retries of each device. `None` before the first.

        Calls inside a user's `tf.function` are not reported.

        Examples:
            >>> mapper = DeviceMap(lambda n: n * n, batch_size=25)
            >>> _ = mapper(tf.range(100))
            >>> mapper.report.rows, mapper.report.engine
            (100, 'chunks')
        """
        return self._observers.report()

    def write(
        self,
        data: Any,
        directory: str | os.PathLike[str],
        *,
        trust_function: bool = False,
        retry_failed: bool = False,
    ) -> Results:
        """Map over `data`, and keep each finished chunk on disk. The same call again computes only what is missing.

        A run that is killed, or finds the disk full, loses only chunks that were not committed. Each run first reads all
        stored chunks, and computes damaged ones again. The directory may come from an author who is not trusted. It holds a
        SQLite database, and must be on a file system with locks.

        Args:
            data: as for `parallel_map`. A later run compares it with the data of the stored chunks. If it has additional rows
                at the end, only these are computed.
            directory: a new or empty directory, or that of an earlier run of the same call.
            trust_function: continue even if `fn` has changed, because the change does not affect the results. Variables that
                `fn` captures must be the same, in the same order.
            retry_failed: compute the rows again that failed in earlier runs. Without it, `on_error="skip"` leaves them out, and
                `on_error="raise"` computes them again.

        Returns:
            The results in the directory, as `devicemap.open_results(directory)` returns them.

        Raises:
            JournalError: the directory holds results of other data, of another call or of another function; another run writes
                to it; or the disk failed. Functions are compared by their graphs and the values that these capture. Unless the
                disk failed, the directory has not changed.

        Warns:
            RuntimeWarning: the directory holds results, and `fn` calls Python code (`tf.py_function`), reads files, or uses
                tables, datasets or iterators. Of these, only the names and the code of Python functions are compared. Or rows
                are added, and `fn` draws from seeds or writes variables in row order: their state is not stored.

        Examples:
            >>> import tempfile
            >>> directory = tempfile.mkdtemp()
            >>> results = DeviceMap(lambda n: n * n, batch_size=2).write(tf.range(5), directory)
            >>> results.load()
            array([ 0,  1,  4,  9, 16], dtype=int32)
        """
        *_, absolute = write(self._mapper, data, directory, trust_function, retry_failed)
        return open_results(absolute)

    def verify(
        self, data: Any, rows: int | None = None, *, tolerance: float | None = None, seconds: float | None = 30.0
    ) -> Verification:
        """Run `fn` on some rows in three modes, and compare the results with those of one device.

        The modes are "again" (one device, all rows at once), "one by one" (one row per call) and "over devices". `fn` runs
        several times for each row, and so do its side effects. With `on_error="skip"`, rows that fail alone are not compared.

        Args:
            data: as for `parallel_map`; the first rows are used.
            rows: number of rows; `None` for two per device, and at least 16.
            tolerance: the allowed difference of floating-point numbers, relative to the largest number of their output. `None`:
                half of the digits of their dtype have to agree. Everything else has to be equal.
            seconds: the approximate time limit, without tracing and compiling; `None` for none. If `fn` is slow, fewer rows are
                compared, but at least 2.

        Returns:
            A `Verification` with `ok` and the findings; print it.

        Raises:
            OptionError, DataError: before anything runs.
            FunctionError: `fn` fails on all rows at once, or over the devices. The error names the first row that fails alone,
                if there is one. A failure only on single rows is a finding.

        Warns:
            RuntimeWarning: the time limit left out rows.

        Examples:
            >>> mapper = DeviceMap(lambda batch: batch - tf.reduce_mean(batch), batched=True)
            >>> verification = mapper.verify(tf.range(6.0), rows=6)
            >>> verification.ok, verification.findings[0].mode
            (False, 'one by one')
        """
        return verify(self._program, data, rows, tolerance, seconds)

    def explain(self, data_or_spec: Any, reducer: Any = None) -> Plan:
        """Return the plan of a call, and what prevents parallelism, without running `fn`.

        `fn` is traced as in a call, which then does not trace it again.

        Args:
            data_or_spec: data as for `parallel_map`, or a nest of `tf.TypeSpec`s, in which `None` rows are unknown.
            reducer: the reducer of a call of `reduce`, to explain such a call.

        Raises:
            DataError, OptionError: as a call; also inside a `tf.function`.
            FunctionError: `fn` cannot be traced.

        Examples:
            >>> plan = DeviceMap(lambda n: n * n, devices=["CPU:0"], batch_size=2).explain(tf.TensorSpec([5], tf.int32))
            >>> plan.rows, plan.engine, plan.vectorized
            (5, 'chunks', True)
        """
        program = self._program if reducer is None else self._program.reducing(Reduction(reducer))
        return explain_call(program, data_or_spec)

    def __repr__(self) -> str:
        return f"DeviceMap({self._program.name}, devices={[short_name(device) for device in self._program.devices]})"


_programs = ProgramCache()


@tf.autograph.experimental.do_not_convert
def _cached_map(fn: Callable[..., Any], options: dict[str, Any]) -> DeviceMap:
    """Return a `DeviceMap` for one call, which shares its program with earlier calls of the same `fn` and options."""
    mapper = object.__new__(DeviceMap)
    mapper._bind(_programs.program_of(fn, options), warns_of_rows=True)
    return mapper
