"""What a stage of a pipeline is, traced: by the same piece as functions of maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from devicemap._tensorflow.keras import is_training
from devicemap.compile.audit import Treatment
from devicemap.compile.random import Stream, Streams
from devicemap.compile.trace import Traced, trace
from devicemap.data.structure import freeze
from devicemap.devices import choose_devices
from devicemap.errors import FunctionError, OptionError, function_error
from devicemap.events import short_name
from devicemap.options import Options


def devices_of_stages(stages: int, devices: Any) -> list[str]:
    """Return one device for each stage.

    Raises:
        OptionError: there are fewer devices than stages.
    """
    known = choose_devices(devices)
    if len(known) < stages:
        names = ", ".join(map(short_name, known))
        raise OptionError(f"{stages} stages, and {len(known)} device(s): {names}. Make fewer stages")
    return list(known[:stages])


class Stage:
    """A function of batches, traced for what it takes."""

    def __init__(self, function: Callable[..., Any], name: str):
        """`name` is for errors: "stage 0 of 2"."""
        self._function, self._name = function, name
        self._known: dict[Any, Traced] = {}
        self._streams = Streams()

    def traced(self, specs: Any) -> Traced:
        """What it is for a nest of these specs, `[None, ...]`.

        Raises:
            FunctionError: it cannot be traced, or does not return rows.
        """
        key = freeze(specs), is_training()
        traced = self._known.get(key) or self._trace(specs)
        if all(hasattr(tensor, "numpy") for tensor in traced.captures):  # else of the graph being built
            self._known[key] = traced
        return traced

    def of_microbatches(self, specs: Any, count: int) -> list[Traced]:
        """What each microbatch of a graph calls: traces of their own where ops keep something for each, as for devices of a
        map: random ops with seeds, Python functions that a tape follows."""
        traced = self.traced(specs)
        if not traced.audit.seeded and not traced.audit.python:
            return [traced] * count
        return [self._trace(specs, self._streams.next()) for _ in range(count)]

    def _trace(self, specs: Any, stream: Stream | None = None) -> Traced:
        try:
            return trace(self._function, specs, Options(batched=True), stream)
        except FunctionError as error:
            original = error.__cause__ or error
            raise function_error(f"{self._name}: {error}", original) from original


def run_in_turn(stages: Sequence[Traced]) -> bool:
    """Whether TensorFlow runs all microbatches of a stage before those of another one, whatever the schedule: gradients of
    Python functions do, and stages of which one writes a variable of another one's."""
    users = Counter(id(handle) for stage in stages for handle in stage.concrete.captured_inputs)
    written = {
        id(handle)
        for stage in stages
        for handle, treatment in zip(stage.concrete.captured_inputs, stage.audit.treatments)
        if treatment not in (None, Treatment.READ)
    }
    return any(stage.audit.python for stage in stages) or any(users[handle] > 1 for handle in written)
