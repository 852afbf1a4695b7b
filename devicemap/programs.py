"""A user's function with its options and devices, and what it was compiled to for each structure of data."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import tensorflow as tf

from devicemap.devices import choose_devices, choose_output_device, places_on
from devicemap.errors import DeviceMapError, FunctionError, brief, function_error
from devicemap.gathering import UNEVEN_ROWS, check_inner_shapes
from devicemap.nests import freeze
from devicemap.options import Options, check_options
from devicemap.rows import HOST, take_rows
from devicemap.seeding import row_seeds
from devicemap.towers import Towers
from devicemap.tracing import trace
from devicemap.types import Shard, short_name

_TOWERS = "_devicemap_towers"
"""The attribute of a graph that is being built that holds, for each program, the towers that belong to it."""


class Structured(Protocol):
    """What `fn` can be traced for: rows, something that rows are read from, or specs alone."""

    @property
    def specs(self) -> Any:
        """Nest of `tf.TypeSpec`s, of shapes `[None, ...]`."""

    @property
    def key(self) -> Any:
        """Hashable: one trace serves one key."""


class Program:
    """Checked options, chosen devices, and a `Towers` per structure of data. Thread-safe."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]):
        self.fn = fn
        self.options: Options = check_options(fn, options)
        self.devices = choose_devices(self.options.devices)
        self.output_device = choose_output_device(self.options.output_device)
        self.name = self.options.name or str(getattr(fn, "__name__", type(fn).__name__))
        self._lock = threading.RLock()
        self._towers: dict[Any, Towers] = {}

    def towers_for(self, data: Structured) -> Towers:
        """What `fn` was traced to for data of this structure, dtypes and inner shapes."""
        towers = self._towers.get(data.key)
        if towers is None and not tf.executing_eagerly():
            towers = self._towers_in_graph().get(data.key)
        return towers or self._trace(data)

    def _trace(self, data: Structured) -> Towers:
        specs = data.specs
        key = freeze(specs)
        with self._lock:
            towers = self._towers.get(key)
            if towers is None:
                towers = Towers(
                    places_on(self.devices),
                    self.output_device,
                    trace(self.fn, specs, self.options),
                    self.name,
                    self.options.report,
                )
            known = self._towers
            if towers.belongs_to_a_graph:  # fn closes over tensors of the user's tf.function
                known = self._towers_in_graph()
            known[key] = known[data.key] = towers
            return towers

    def _towers_in_graph(self) -> dict[Any, Towers]:
        """What `fn` was traced to in the graph that is being built, where it closes over tensors of that.

        The graph keeps it, not the program: a table of weak graphs would hold them for good, since towers refer to theirs.
        """
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, _TOWERS):
            setattr(graph, _TOWERS, weakref.WeakKeyDictionary())
        found: dict[Any, Towers] = getattr(graph, _TOWERS).setdefault(self, {})
        return found

    def seeded(self, leaves: tuple[Any, ...], first_row: int, rows: Any) -> tuple[Any, ...]:
        """The leaves, and with the option `seed` the seed of each row behind them."""
        if self.options.seed is None:
            return leaves
        with tf.device(HOST):
            return (*leaves, row_seeds(self.options.seed, first_row, rows))

    def located(
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
                    return self.failed(again, [shard]), again
            try:
                for parts in zip(*(results for results, _ in outcomes)):
                    check_inner_shapes(parts)
            except FunctionError as uneven:
                return uneven, error
        return self.failed(error, shards), error

    def failed(self, error: BaseException, shards: Sequence[Shard]) -> BaseException:
        """The error to raise for one that came from `shards`: from one of several, or one after another."""
        if isinstance(error, DeviceMapError) or not isinstance(error, Exception):
            return error
        again = len({(shard.start, shard.stop) for shard in shards}) == 1  # the same rows, on one device after another
        where = (
            ", then ".join([str(shards[0]), *(short_name(shard.device) for shard in shards[1:])])
            if again
            else ", or ".join(map(str, shards))
        )
        what = brief(error)
        uneven = not self.options.batched and "Incompatible shapes during merge" in what
        hint = f". A dense tensor cannot hold rows of different shapes. {UNEVEN_ROWS}" if uneven else ""
        located = function_error(f"{self.name} failed on {where}: {type(error).__name__}: {what}{hint}", error, shards)
        located.__cause__ = error
        return located
