"""parallel_map and DeviceMap: how rows travel from the user's data to the devices and back.

    data ── as_rows ──> leaves [rows, ...] ── shard_sizes ──> a shard per place ── Towers ──> results ── gather ──> rows

In-memory data goes through one graph that holds all of this. Datasets, and data with a `batch_size`, go in chunks, each
to the first idle device.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.chunking import Chunk, InMemory, Source, from_dataset
from devicemap.devices import choose_devices, choose_output_device, gpu_indices, places_on
from devicemap.errors import DataError, DeviceMapError, FunctionError, OptionError, brief, function_error
from devicemap.execution import Towers, sizes_in_graph
from devicemap.explaining import Asked, Plan, ask, explain_call
from devicemap.gathering import check_inner_shapes, check_row_counts, join, with_row_counts_checked, with_static_rows
from devicemap.internals import Cancellation, have_tangents, tape_is_recording
from devicemap.journal.digests import digest_rows
from devicemap.journal.encoding import describe_call, encode_leaves
from devicemap.journal.results import Results, open_results
from devicemap.journal.resuming import Unfinished, check_rows
from devicemap.journal.writing import open_journal
from devicemap.options import Options, check_options
from devicemap.reporting import GraphCall, ProgressBar, Recorder, Report
from devicemap.rows import HOST, Rows, as_rows, count_rows, freeze, take_rows
from devicemap.scheduling import reorder_window
from devicemap.streaming import Group, Lane, Rules, run_chunks
from devicemap.tracing import row_seeds, trace
from devicemap.types import Event, Shard, short_name
from devicemap.verifying.checking import check_limits, rows_to_verify, verify_rows
from devicemap.verifying.findings import Verification

_KEPT_MAPPERS = 64


def parallel_map(
    fn: Callable[..., Any],
    data: Any,
    *,
    devices: Any = None,
    batched: bool = False,
    vectorize: bool | str = "auto",
    batch_size: int | str | None = None,
    seed: int | None = None,
    fn_output_signature: Any = None,
    jit_compile: bool = False,
    output_device: Any = "/CPU:0",
    deterministic: bool = True,
    prefetch: int = 2,
    max_retries: int = 2,
    progress: bool | Callable[[Event], Any] = False,
    name: str | None = None,
    **unknown: Any,
) -> Any:
    """Map `fn` over the rows of `data` on several devices at once.

    The result is that of `tf.map_fn(fn, data)`, or of `fn(data)` with `batched=True`, to rounding: same rows, order,
    structure and dtypes, on any number of devices. Calling it again with the same `fn` and options does not trace again,
    as long as `fn` is among the last 64 that were mapped; keep a `DeviceMap` to be independent of that.

    Args:
        fn: takes one sample, or with `batched=True` a batch of rows, and returns one result, or as many rows. A tuple
            in `data` is passed as several arguments, a dict or named tuple as one.
        data: a nest of tensors, arrays, lists, `RaggedTensor`s or `SparseTensor`s of shape `[rows, ...]`, or a
            `tf.data.Dataset` of samples (`batched=False`) or of batches of rows (`batched=True`).
        devices: `None` for every local GPU, else every local CPU; a kind (`"GPU"`); or a list of names (`"GPU:1"`,
            `"/device:GPU:1"`, full names) or logical or physical devices.
        batched: whether `fn` takes a batch.
        vectorize: how a `fn` of one sample runs over the rows of a device: `True` as `tf.vectorized_map`, `False` as
            `tf.map_fn`, `"auto"` the first where every op converts and the results are dense, else the second.
        batch_size: rows per device call: data goes in chunks of at most that many rows, each to the first idle device.
            `"auto"`: found by measuring, for each device. `None`: in-memory data as one shard per device, a dataset's
            batches as they are, its samples as with `"auto"`.
        seed: an int from 0 to 2**32 - 1: `fn` also gets `seed=`, a seed for `tf.random.stateless_*` (int32 `[2]`;
            `[rows, 2]` when batched) that depends on `seed` and the row's index alone.
        fn_output_signature: as in `tf.map_fn`, for a `fn` of one sample whose dense results differ in shape.
        jit_compile: compile with XLA. Shards run in pieces of powers of two rows, to compile for few shapes.
        output_device: where results are gathered.
        deterministic: for streams: chunks in input order, or as they finish, each as `(first row, chunk)`.
        prefetch: chunks in flight per device, so that copying in, computing and copying out overlap.
        max_retries: how often a chunk that failed is tried again, on another device if there is one. What `fn` does
            besides returning may then happen again. 0: the first error is raised, also where a device runs out of memory,
            which otherwise gets smaller chunks.
        progress: a progress bar; or a callable that gets each `devicemap.types.Event` of the call, one at a time.
        name: a name for the ops and errors of this map.

    Returns:
        The nest that `fn` returns, of tensors of shape `[rows, ...]` on `output_device`. Lists in it become tensors.

    Raises:
        OptionError, DataError: before anything runs, for options and data that cannot be.
        FunctionError: `fn` failed; it names the device and rows, and is an instance of the original error's class too.

    Example:
        >>> parallel_map(lambda row: tf.reduce_sum(row), tf.reshape(tf.range(6), [3, 2])).numpy()
        array([1, 5, 9], dtype=int32)
    """
    options = dict(
        devices=devices, batched=batched, vectorize=vectorize, batch_size=batch_size, seed=seed,
        fn_output_signature=fn_output_signature, jit_compile=jit_compile, output_device=output_device,
        deterministic=deterministic, prefetch=prefetch, max_retries=max_retries, progress=progress, name=name, **unknown,
    )  # fmt: skip
    return _mapper_of(fn, options)(data)


class DeviceMap:
    """A function mapped over devices: compiled once for each structure of data, reusable, thread-safe.

    The options are those of `parallel_map`.

    Example:
        >>> mapper = DeviceMap(lambda x, y: {"sum": x + y})
        >>> mapper((tf.range(3), tf.range(3)))["sum"].numpy()
        array([0, 2, 4], dtype=int32)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        devices: Any = None,
        batched: bool = False,
        vectorize: bool | str = "auto",
        batch_size: int | str | None = None,
        seed: int | None = None,
        fn_output_signature: Any = None,
        jit_compile: bool = False,
        output_device: Any = "/CPU:0",
        deterministic: bool = True,
        prefetch: int = 2,
        max_retries: int = 2,
        progress: bool | Callable[[Event], Any] = False,
        name: str | None = None,
        **unknown: Any,
    ):
        options = dict(
            devices=devices, batched=batched, vectorize=vectorize, batch_size=batch_size, seed=seed,
            fn_output_signature=fn_output_signature, jit_compile=jit_compile, output_device=output_device,
            deterministic=deterministic, prefetch=prefetch, max_retries=max_retries, progress=progress, name=name, **unknown,
        )  # fmt: skip
        self._fn = fn
        self._options: Options = check_options(fn, options)
        self._devices = choose_devices(self._options.devices)
        self._output_device = choose_output_device(self._options.output_device)
        self._name = self._options.name or str(getattr(fn, "__name__", type(fn).__name__))
        self._gpus = gpu_indices(self._devices)
        self._last_call: GraphCall | Recorder | None = None
        self._lock = threading.RLock()
        self._towers: dict[Any, Towers] = {}
        self._towers_in: weakref.WeakKeyDictionary[Any, dict[Any, Towers]] = weakref.WeakKeyDictionary()

    def __call__(self, data: Any) -> Any:
        """Map over all of `data`; see `parallel_map` for what it may be and what comes back."""
        eager = tf.executing_eagerly()
        if isinstance(data, tf.data.Dataset):
            source = self._source(data, "mapped")
            if data.cardinality() == tf.data.INFINITE_CARDINALITY:
                raise DataError(
                    "the dataset is infinite, and its whole result would be too; take a part of it with .take(n), or map "
                    "it as a stream"
                )
            return self._in_chunks(source)
        rows = as_rows(data)
        if not eager:
            return self._inside_function(rows)
        if self._options.batch_size is not None:
            return self._in_chunks(self._source(rows, "mapped"))
        return self._in_one_graph(rows)

    def stream(self, data: Any) -> Iterator[Any]:
        """Map over `data` chunk by chunk, in memory bounded by what is in flight, however long the data is.

        Args:
            data: as for `parallel_map`; a dataset may be infinite.

        Returns:
            A generator of chunks: nests of tensors of shape `[rows of the chunk, ...]`. Those of a dataset of batches are
            its batches, those of everything else have `batch_size` rows, or with `batch_size=None` or `"auto"` as many as
            pay. With `deterministic=False` they come as they finish, each as `(first row, chunk)`. Nothing is read before
            the first chunk is asked for; closing or dropping the generator stops everything.

        Raises:
            OptionError, DataError: at once. `FunctionError` and errors of the dataset: when their turn comes; what was
                finished before them has been delivered.

        Example:
            >>> mapper = DeviceMap(lambda n: n * n, batch_size=2)
            >>> [chunk.numpy().tolist() for chunk in mapper.stream(tf.range(5))]
            [[0, 1], [4, 9], [16]]
        """
        source = self._source(data, "streamed")
        towers = self._towers_for(source)
        return self._stream(source, towers)

    def as_dataset(self, data: Any) -> tf.data.Dataset:
        """The chunks of `stream(data)` as a `tf.data.Dataset`, for instance for `model.fit`.

        Its elements are as `stream` yields them, of shape `[None, ...]`. Each iteration over it maps anew, so use
        `.cache()` to keep the results of the first.

        Example:
            >>> dataset = DeviceMap(lambda n: n * n, batch_size=2).as_dataset(tf.range(5))
            >>> dataset.element_spec
            TensorSpec(shape=(None,), dtype=tf.int32, name=None)
            >>> [n.item() for n in dataset.unbatch().as_numpy_iterator()]
            [0, 1, 4, 9, 16]
        """
        towers = self._towers_for(self._source(data, "streamed"))
        spec = towers.pack(list(towers.traced.specs))
        if not self._options.deterministic:
            spec = (tf.TensorSpec([], tf.int64), spec)
        return tf.data.Dataset.from_generator(lambda: self.stream(data), output_signature=spec)

    @property
    def report(self) -> Report | None:
        """What happened in the last call that has finished: rows, times, devices, retries; `None` before the first.

        Calls inside a `tf.function` of the user's are not seen.

        Example:
            >>> mapper = DeviceMap(lambda n: n * n)
            >>> _ = mapper(tf.range(100))
            >>> mapper.report.rows, mapper.report.way
            (100, 'one graph')
        """
        return None if self._last_call is None else self._last_call.report()

    def write(self, data: Any, directory: str | os.PathLike[str]) -> Results:
        """Map over `data`, and keep each finished chunk on disk; run again, it computes only what is missing.

        Killed at any moment, also by a full disk, it loses at most the chunks that were in flight. A chunk file that is
        damaged or half written is computed again.

        Args:
            data: as for `parallel_map`; the same again when it is run again, which is checked.
            directory: a new or empty one, or one that an earlier run of the same call has left.

        Returns:
            What the directory holds, as `devicemap.open_results(directory)` does.

        Raises:
            JournalError: the directory holds something else, results of other data or of another call, or another
                process writes to it; then nothing in it has been touched. Or the disk failed.

        Example:
            >>> import tempfile
            >>> directory = tempfile.mkdtemp()
            >>> results = DeviceMap(lambda n: n * n, batch_size=2).write(tf.range(5), directory)
            >>> results.load()
            array([ 0,  1,  4,  9, 16], dtype=int32)
        """
        in_memory = not isinstance(data, tf.data.Dataset)
        if in_memory:
            data = as_rows(data)
        elif data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise DataError("the dataset is infinite, and its results would be too; take a part of it with .take(n)")
        source = self._source(data, "written")
        towers = self._towers_for(source)
        specs = towers.pack(list(towers.traced.specs))
        header = describe_call(specs, source.specs, self._options, source.rows, None, self._name)
        with open_journal(directory, header) as journal:
            if in_memory:
                check_rows(data, journal)
            missing = Unfinished(source, journal, compared=in_memory)

            def keep(chunk: Chunk, results: list[Any]) -> None:
                stop = chunk.start + chunk.count
                journal.append(chunk.start, stop, encode_leaves(results), digest_rows(chunk.leaves))

            for _ in self._groups(missing, towers, Rules(), keep):
                pass
            journal.finish(missing.rows_read)
        return open_results(directory)

    def verify(self, data: Any, rows: int | None = None, *, tolerance: float | None = None) -> Verification:
        """Run `fn` on some rows in several ways, and compare: does it give the same however its rows are spread?

        The ways are: all rows at once, the same again, one by one, over the devices and in reverse, in a graph and in eager
        code. So `fn` is called many times, on more rows than there are: whatever it does besides returning happens as
        often, and nothing that it writes is put back.

        Args:
            data: as for `parallel_map`; the first rows are taken.
            rows: how many; `None` for two per device, and at least 16.
            tolerance: by how much numbers with a fraction may differ and still be the same, relative to the largest number
                of their output. `None`: half of the digits of their dtype have to agree. Everything else has to be equal.

        Returns:
            A `Verification` with `ok` and the findings; print it.

        Raises:
            OptionError, DataError: before anything runs. `FunctionError`: `fn` fails over the devices; what fails in other
                ways only is a finding.

        Example:
            >>> mapper = DeviceMap(lambda batch: batch - tf.reduce_mean(batch), batched=True)
            >>> verification = mapper.verify(tf.range(6.0), rows=6)
            >>> verification.ok, verification.findings[0].kind
            (False, 'coupled')
        """
        check_limits(rows, tolerance)
        some = rows_to_verify(data, rows, self._options, self._devices)
        return verify_rows(self._fn, some, self._options, self._towers_for(some), self, tolerance, self._name)

    def explain(self, data_or_spec: Any) -> Plan:
        """What a call would do, and what stands in the way of parallelism, without running `fn`.

        `fn` is traced, and graphs are built, as a call would; a later call does neither again.

        Args:
            data_or_spec: data as for `parallel_map`, or a nest of `tf.TypeSpec`s in its place; `None` rows are unknown.

        Raises:
            DataError, OptionError: as a call; also inside a `tf.function`. `FunctionError`: `fn` cannot be traced.

        Example:
            >>> plan = DeviceMap(lambda n: n * n, devices=["CPU:0"], batch_size=2).explain(tf.TensorSpec([5], tf.int32))
            >>> plan.rows, plan.way, plan.vectorized
            (5, 'chunks', True)
        """
        asked = ask(data_or_spec, self._options)
        towers = self._towers_for(asked)
        return explain_call(asked, towers, self._options, self._fn, self._devices, self._output_device, self._name)

    def __repr__(self) -> str:
        return f"DeviceMap({self._name}, devices={[d.rpartition('device:')[2] for d in self._devices]})"

    def _in_one_graph(self, rows: Rows) -> Any:
        """In-memory data, in eager code: one graph takes it to the devices and back."""
        towers = self._towers_for(rows)
        if not rows.count:
            return towers.pack(towers.no_rows())
        taped = tape_is_recording()
        shards, sizes = towers.shards(rows.count)
        arguments = (sizes, *self._seeded(rows.leaves, 0, rows.count))
        if taped and have_tangents([*towers.flat(rows.leaves), *towers.traced.concrete.captured_inputs]):
            raise DataError(
                "a tf.autodiff.ForwardAccumulator follows the data or a variable of fn, and TensorArray, which gathers the "
                "rows, has no forward mode; use a tf.GradientTape"
            )
        graph = towers.graph(len(shards), differentiable=taped)
        with GraphCall(shards, towers.take_traces(), self._gpus, self._listeners(), self._keep_call):
            try:
                # A tape records what its own thread does, so a taped call stays in this one.
                results, returned = graph(*arguments) if taped else towers.run(graph, arguments)
            except Exception as error:
                located, cause = self._located(error, towers, arguments[1:], shards)
                raise located from cause
            if self._options.batched:
                check_row_counts(results, returned, shards)
        return towers.pack(results)

    def _inside_function(self, rows: Rows) -> Any:
        """In-memory data, inside the user's own `tf.function`: the same graph becomes a part of it."""
        if self._options.batch_size is not None:
            raise OptionError(
                f"batch_size={self._options.batch_size} inside a tf.function: chunks are handed out in eager code. Map "
                "outside of the tf.function, or leave batch_size out"
            )
        towers = self._towers_for(rows)
        if rows.count == 0:
            return towers.pack(towers.no_rows())
        count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
        places = len(towers.places) if rows.count is None else len(towers.shards(rows.count)[0])
        sizes = sizes_in_graph(count, places) if rows.count is None else towers.shards(rows.count)[1]
        graph = towers.graph(places, differentiable=True, any_rows=rows.count is None)
        results, returned = graph(sizes, *self._seeded(rows.leaves, 0, count))
        if self._options.batched:
            results = with_row_counts_checked(results, returned, sizes)
        return towers.pack([with_static_rows(leaf, rows.count) for leaf in results])

    def _source(self, data: Any, what: str) -> Source:
        """Rows or a dataset, to be read chunk by chunk."""
        if not tf.executing_eagerly():
            raise DataError(
                f"data cannot be {what} chunk by chunk inside a tf.function; do it outside, or pass tensors and no batch_size"
            )
        if tape_is_recording():
            raise OptionError(
                "a GradientTape is recording, and gradients do not go through chunks: pass in-memory data without "
                "batch_size, or put the call into `with tape.stop_recording():` if you need none of it"
            )
        if isinstance(data, tf.data.Dataset):
            return from_dataset(data, self._options)
        size = self._options.batch_size
        return InMemory(data if isinstance(data, Rows) else as_rows(data), size if isinstance(size, int) else None)

    def _in_chunks(self, source: Source) -> Any:
        """Data that is read chunk by chunk: each goes to the first idle device, the results are joined in order."""
        towers = self._towers_for(source)
        parts = [results for group in self._groups(source, towers, Rules()) for results in group.results]
        if not parts:
            return towers.pack(towers.no_rows())
        with tf.device(self._output_device):
            return towers.pack([join(leaves) for leaves in zip(*parts)])

    def _stream(self, source: Source, towers: Towers) -> Iterator[Any]:
        window = reorder_window(sum(towers.in_flight(self._options.prefetch).values()))
        rules = Rules(window=window, deterministic=self._options.deterministic)
        for group in self._groups(source, towers, rules):
            with tf.device(self._output_device):
                chunk = towers.pack([join(leaves) for leaves in zip(*group.results)])
            yield chunk if self._options.deterministic else (group.start, chunk)

    def _groups(
        self, source: Source, towers: Towers, rules: Rules, keep: Callable[[Chunk, list[Any]], None] | None = None
    ) -> Iterator[Group]:
        """The results of all chunks; where they are kept elsewhere, groups without results."""
        recorder = Recorder("chunks", towers.take_traces(), self._gpus)
        listeners: tuple[Callable[[Event], object], ...] = (recorder, *self._listeners())

        def tell(event: Event) -> None:
            for listener in listeners:
                listener(event)

        cancellation = Cancellation()
        functions = towers.functions(cancellation)
        lanes = [
            Lane(device, partial(self._run_chunk, towers, functions[device], device, keep), in_flight)
            for device, in_flight in towers.in_flight(self._options.prefetch).items()
        ]
        rules = replace(
            rules,
            max_retries=self._options.max_retries,
            observe=tell,
            describe=self._failed,
            cancel=cancellation.cancel,
        )
        try:
            yield from run_chunks(source, lanes, rules, towers.paces)
        finally:
            self._keep_call(recorder)

    def _run_chunk(
        self,
        towers: Towers,
        function: Callable[..., Any],
        device: str,
        keep: Callable[[Chunk, list[Any]], None] | None,
        chunk: Chunk,
    ) -> list[Any] | None:
        leaves = self._seeded(chunk.leaves, chunk.start, chunk.count)
        results: list[Any] = function(*towers.flat(leaves))
        if self._options.batched:
            check_row_counts(results, [], [chunk.on(device)])
        return results if keep is None else keep(chunk, results)

    def _listeners(self) -> tuple[Callable[[Event], object], ...]:
        """Who hears of a call besides its report."""
        progress = self._options.progress
        return (ProgressBar(self._name),) if progress is True else (progress,) if progress else ()

    def _keep_call(self, call: GraphCall | Recorder) -> None:
        self._last_call = call

    def _seeded(self, leaves: tuple[Any, ...], first_row: int, rows: Any) -> tuple[Any, ...]:
        if self._options.seed is None:
            return leaves
        with tf.device(HOST):
            return (*leaves, row_seeds(self._options.seed, first_row, rows))

    def _towers_for(self, data: Rows | Source | Asked) -> Towers:
        """What `fn` was traced to for data of this structure, dtypes and inner shapes."""
        towers = self._towers.get(data.key)
        if towers is None and not tf.executing_eagerly():
            towers = self._towers_in.get(tf.compat.v1.get_default_graph(), {}).get(data.key)
        return towers or self._trace(data)

    def _trace(self, data: Rows | Source | Asked) -> Towers:
        specs = data.specs
        key = freeze(specs)
        with self._lock:
            towers = self._towers.get(key)
            if towers is None:
                towers = Towers(
                    places_on(self._devices),
                    self._output_device,
                    lambda stream: trace(self._fn, specs, self._options, stream),
                    self._name,
                )
            known = self._towers
            if towers.belongs_to_a_graph:  # fn closes over tensors of the user's tf.function
                known = self._towers_in.setdefault(tf.compat.v1.get_default_graph(), {})
            known[key] = known[data.key] = towers
            return towers

    def _located(
        self, error: Exception, towers: Towers, leaves: Sequence[Any], shards: Sequence[Shard]
    ) -> tuple[BaseException, BaseException]:
        """The error for a graph that failed, and its cause.

        TensorFlow does not tell which tower it was. So the shards run once more, each for itself, unless that would write
        a variable again.
        """
        if len(shards) > 1 and not towers.traced.audit.writes:

            def attempt(function: Any, shard: Shard) -> Any:
                rows = [take_rows(leaf, shard.start, shard.stop) for leaf in leaves]
                try:
                    return function(*towers.flat(rows)), None
                except Exception as again:
                    return None, again

            functions = towers.functions()
            with ThreadPoolExecutor(len(shards)) as pool:
                outcomes = list(pool.map(attempt, (functions[shard.device] for shard in shards), shards))
            for shard, (_, again) in zip(shards, outcomes):
                if again is not None:
                    return self._failed(again, [shard]), again
            try:
                for parts in zip(*(results for results, _ in outcomes)):
                    check_inner_shapes(parts)
            except FunctionError as uneven:
                return uneven, error
        return self._failed(error, shards), error

    def _failed(self, error: BaseException, shards: Sequence[Shard]) -> BaseException:
        """The error to raise for one that came from `shards`: from one of several, or one after another."""
        if isinstance(error, DeviceMapError) or not isinstance(error, Exception):
            return error
        again = len({(shard.start, shard.stop) for shard in shards}) == 1  # the same rows, on one device after another
        where = (
            ", then ".join([str(shards[0]), *(short_name(shard.device) for shard in shards[1:])])
            if again
            else ", or ".join(map(str, shards))
        )
        located = function_error(
            f"{self._name} failed on {where}: {type(error).__name__}: {brief(error)}", error, shards
        )
        located.__cause__ = error
        return located


_mappers: OrderedDict[Any, DeviceMap] = OrderedDict()
_mappers_lock = threading.Lock()


def _mapper_of(fn: Callable[..., Any], options: dict[str, Any]) -> DeviceMap:
    """The mapper of an earlier `parallel_map` with the same `fn` and options, or a new one."""
    try:
        # with the types: 1 is True to a dict, and not to `batch_size`
        key = (fn, *((name, type(value), freeze(value)) for name, value in options.items()))
        hash(key)
    except TypeError:  # an fn or option that cannot be a key
        return DeviceMap(fn, **options)
    with _mappers_lock:
        mapper = _mappers.pop(key, None) or DeviceMap(fn, **options)
        _mappers[key] = mapper
        while len(_mappers) > _KEPT_MAPPERS:
            _mappers.popitem(last=False)
        return mapper
