"""`devicemap.benchmark`: eager code, one device and all devices; time and memory against batch size."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from numbers import Real
from statistics import median
from timeit import timeit
from typing import Any

import tensorflow as tf

from devicemap.bench.measurements import BenchmarkResult, Measurement, next_batch, rows_within
from devicemap.compile.program import Program
from devicemap.compile.random import row_seeds
from devicemap.data.rows import HOST, Rows, as_rows, first_rows, take_rows
from devicemap.data.shards import join
from devicemap.data.sources import rows_in_memory
from devicemap.data.structure import as_objects
from devicemap.devices import choose_devices, is_out_of_memory, list_devices
from devicemap.errors import DataError, OptionError, error_text, warn_user
from devicemap.events import short_name
from devicemap.options import check_count
from devicemap.run.graph_engine import CallObservers
from devicemap.run.mapper import Mapper
from devicemap.run.scheduler import peak_bytes
from devicemap.training.variables import colocate_slots

_ROWS_OF_A_DATASET = 1024

_ROWS_IN_EAGER_CODE = 16
"""Eager code can be a thousand times slower than a graph, so it maps few single rows."""

_MOST_DATA_BYTES = 2**32
"""The search for the largest batch repeats the rows up to this size in the memory of the host."""

_SHARE_OF_A_CALL = 0.25
"""One device maps all rows four times: in three calls that warm up, and in the first round."""

Call = Callable[[Rows], Any]


def benchmark(
    fn: Any,
    data: Any,
    *,
    devices: Any = None,
    batch_sizes: Iterable[int] | None = None,
    rounds: int = 10,
    seconds: float = 30.0,
    max_rows: int | None = None,
    **options: Any,
) -> BenchmarkResult:
    """Measure `fn` in eager code, on one device and on all devices, and time and peak memory against batch size.

    A batch is a call with one chunk for each device. Starting chunks takes up to 15 ms, so batches have no speed-up in the
    table. All calls are traced and warmed up, and then take turns in rounds. A call ends when its results are on the host. `fn`
    and its side effects run many times. Results are not compared; use `DeviceMap.verify` for that.

    If devices report their memory, larger and larger batches of repeated rows run until one runs out of memory. TensorFlow
    then waits 10 seconds, and logs the state of its allocator. Its counters of peak memory are reset.

    Args:
        fn: as in `DeviceMap`. Eager code runs it on the first device, on all rows if `batched`, and otherwise on 16 rows. Or a
            compiled, parallelized Keras model, whose training steps are measured. Then its weights, seeds, metrics and the
            state of its optimizer are restored.
        data: as in `DeviceMap`, or for a model `(x, y)` or `(x, y, sample_weight)`. The first rows of a dataset are read.
        devices: as in `DeviceMap`. A model has its own devices. "one device" is the first device.
        batch_sizes: rows of the batches, over all devices. By default, some sizes up to the number of rows, then the search.
        rounds: the largest number of rounds.
        seconds: a time budget for the batches, and again for the other modes and the rounds. The first batch and one round
            always run. If the rows take one device more than a quarter of `seconds`, fewer rows are used, with a warning.
        max_rows: the number of rows to use. By default all rows in memory, and 1024 of a dataset.
        **options: further options of `DeviceMap`, such as `batched`.

    Returns:
        A `BenchmarkResult`; print it.

    Raises:
        OptionError, DataError: invalid options or data, or data without rows. They are raised before anything runs.
        FunctionError: `fn` failed on the devices, except for lack of memory.

    Examples:
        >>> result = benchmark(lambda row: tf.reduce_sum(row), tf.ones([8, 2]), devices="CPU:0", rounds=1)
        >>> [(m.mode, m.rows) for m in result.measurements]
        [('batch', 1), ('batch', 2), ('batch', 8), ('eager', 8), ('one device', 8), ('all devices', 8)]
        >>> result.no_memory
        'TensorFlow does not count the memory of CPU:0'
    """
    check_count("rounds", rounds)
    check_count("max_rows", 1 if max_rows is None else max_rows)
    if not (isinstance(seconds, Real) and seconds > 0):
        raise OptionError(f"seconds={seconds!r}; expected a time budget above 0, in seconds")
    if "batch_size" in options:
        raise OptionError(f"batch_size={options['batch_size']!r}: a benchmark varies it; use batch_sizes=")
    if batch_sizes is not None:
        batch_sizes = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [batch_sizes]
        for size in batch_sizes:
            check_count("batch_sizes", size)
    model = hasattr(fn, "train_step") and "detach" in vars(fn)
    if model and (options or devices is not None or not fn.compiled):
        raise OptionError("fn is a parallelized model; expected a compiled one, and neither devices= nor other options")
    names = tuple(share.device for share in fn.report().devices) if model else choose_devices(devices)
    program = Program(fn, {"batched": True} if model else {**options, "devices": names})
    usual_rows = _ROWS_OF_A_DATASET if isinstance(data, tf.data.Dataset) else None
    rows = rows_in_memory(data, program.options, max_rows or usual_rows)
    count, step = rows.count or 0, len(names)
    described = {device.name: device for device in list_devices()}
    uncounted = [short_name(name) for name in names if peak_bytes(name) is None]
    reason = f"TensorFlow does not count the memory of {', '.join(uncounted)}" if uncounted else None
    result = BenchmarkResult(fn.name if model else program.name, tuple(described[n] for n in names), no_memory=reason)
    calls = _calls_of_model(fn, names[0], rows.specs) if model else {}
    timed: dict[int, Callable[[], None]] = {}

    def measure(mode: str, some: Rows) -> None:
        nonlocal result
        call = partial(_run_and_wait, calls.get(mode) or _call_of_function(program, mode, some.count or 0), some)
        m = _measure(Measurement(mode, some.count or 0), call, names if mode == "batch" and not reason else ())
        if not m.error and m.rows <= count:  # larger batches are not timed again
            timed[len(result.measurements)] = call
        result = replace(result, measurements=(*result.measurements, m))

    with _restored(fn) if model else nullcontext():
        deadline = time.perf_counter() + seconds
        usual = {step, *(count // part // step * step for part in (16, 4, 1))} - {0}
        for size in sorted(batch_sizes or usual):
            measure("batch", _repeated(rows, size))
            if result.measurements[-1].error or time.perf_counter() > deadline:
                break
        if batch_sizes is None and not reason and all(device.memory for device in result.devices):
            leaves = tf.nest.flatten(rows.structure, expand_composites=True)
            most = _MOST_DATA_BYTES * count // max(1, sum(leaf.numpy().nbytes for leaf in leaves))
            while time.perf_counter() < deadline and (larger := next_batch(result)) and larger <= most:
                measure("batch", _repeated(rows, larger))
        used = int(min(count, max(step, rows_within(result, _SHARE_OF_A_CALL * seconds))))
        if used < count:
            warn_user(
                f"{result.name}: one device and all devices map {used} of {count} rows, because fn is slow. Raise seconds for "
                "more rows",
            )
        some = first_rows(rows, used)
        measure("eager", some if program.options.batched else first_rows(some, _ROWS_IN_EAGER_CODE))
        measure("one device", some)
        measure("all devices", some)
        medians = median_seconds([*timed.values()], rounds, seconds)
    measurements = [*result.measurements]
    for i, measured in zip(timed, medians):
        measurements[i] = replace(measurements[i], seconds=measured)
    return replace(result, measurements=tuple(measurements))


def median_seconds(calls: Sequence[Callable[[], object]], rounds: int, seconds: float = math.inf) -> list[float]:
    """Return the median seconds of each of `calls`, which wait for their results.

    Each round times every call, in random order, so that noise affects all calls alike. After `seconds`, no new round starts.
    """
    times: list[list[float]] = [[] for _ in calls]
    order, deadline = random.Random(0), time.perf_counter() + seconds
    for _ in range(rounds):
        for i in order.sample(range(len(calls)), len(calls)):
            times[i].append(timeit(calls[i], number=1))
        if time.perf_counter() > deadline:
            break
    return [*map(median, times)]


def _measure(m: Measurement, call: Callable[[], None], counted: Sequence[str]) -> Measurement:
    """Measure the first three calls, and the peak memory of devices."""
    gc.collect()  # discarded maps keep memory of devices until then
    for name in counted:
        tf.config.experimental.reset_memory_stats(name)
    try:
        first, seconds = timeit(call, number=1), timeit(call, number=2) / 2
    except Exception as error:
        if m.mode in ("all devices", "batch") and not is_out_of_memory(error):
            raise
        return replace(m, error=error_text(error))
    peaks = tuple(peak_bytes(name) or 0 for name in counted) or None
    return replace(m, first_call_seconds=first, seconds=seconds, peak_memory_bytes=peaks)


def _call_of_function(program: Program, mode: str, count: int) -> Call:
    """Return a function that maps `count` rows in a mode."""
    if mode == "eager":
        return partial(_run_eagerly, program)
    if mode == "one device":
        program = Program(program.fn, {**vars(program.options), "devices": program.devices[:1]})
    elif mode == "batch":
        program = copy(program)  # copies of a program share traces, and replicas of variables
        size = math.ceil(count / len(program.devices))
        program.options = replace(program.options, batch_size=size, prefetch=1, max_retries=0)
    mapper = Mapper(program, CallObservers())
    return lambda rows: mapper.run(rows.structure)


def _calls_of_model(model: Any, device: str, specs: Any) -> dict[str, Call]:
    """Return a training step for each mode, for batches of any size as in `fit`."""
    step = partial(type(model).train_step, model)  # Keras's own step, on one device

    def eager(rows: Rows) -> Any:
        with tf.device(device):
            return step(rows.structure)

    def graph(step: Callable[[Any], Any], jit_compile: bool = False) -> Call:
        function = tf.function(step, [specs], autograph=False, jit_compile=jit_compile)

        def call(rows: Rows) -> Any:
            try:
                return function(rows.structure)
            except (AttributeError, ValueError) as error:  # AttributeError since Keras 3.16
                if type(specs) is tuple and len(specs) > 1:
                    raise
                raise DataError(
                    "a training step failed, and data has no targets: pass (x, y) or (x, y, sample_weight): "
                    f"{error_text(error)}"
                ) from error

        return call

    over_all = graph(model.train_step)
    alone = graph(step, bool(model.jit_compile))
    return {"batch": over_all, "eager": eager, "one device": alone, "all devices": over_all}


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Restore the variables of a model after the context."""
    with colocate_slots(model):
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    values = [variable.numpy() for variable in variables]
    try:
        yield
    finally:
        model.reset_metrics()  # the first step may have created some
        for variable, value in zip(variables, values):
            variable.assign(value)


def _run_and_wait(call: Call, rows: Rows) -> None:
    for tensor in tf.nest.flatten(call(rows), expand_composites=True):
        if isinstance(tensor, tf.Tensor):
            tensor.numpy()


def _run_eagerly(program: Program, rows: Rows) -> Any:
    """Run the function on the first device in eager code: once if it takes a batch, else on each row."""

    @tf.autograph.experimental.do_not_convert  # map_fn would convert it in eager code too, which is slower
    def run(arguments: tuple[Any, ...]) -> int:
        data, keywords = as_objects(arguments[0]), dict(zip(["seed"], arguments[1:]))
        results.append(program.fn(*data, **keywords) if type(data) is tuple else program.fn(data, **keywords))
        return 0

    results: list[Any] = []
    seed = program.options.seed
    arguments = (rows.structure,) if seed is None else (rows.structure, row_seeds(seed, 0, rows.count))
    with tf.device(program.devices[0]):
        run(arguments) if program.options.batched else tf.map_fn(run, arguments, fn_output_signature=tf.int32)
    return results


def _repeated(rows: Rows, count: int) -> Rows:
    """Return the first `count` rows, repeated if there are fewer."""
    times = math.ceil(count / (rows.count or 1))
    with tf.device(HOST):
        return as_rows(tf.nest.map_structure(lambda leaf: take_rows(join([leaf] * times), 0, count), rows.structure))
