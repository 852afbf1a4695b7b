"""Who hears of the calls of a map: its report, a bar, the user's callable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from devicemap.base.options import Options
from devicemap.events import Event, Shard
from devicemap.tell.report.progress import ProgressBar
from devicemap.tell.report.recorder import GraphCall, Recorder


class Observers:
    """As the options of a map say; `run.calls.Observers` tells what calls ask of it."""

    def __init__(self, name: str, options: Options, gpus: Mapping[str, int]):
        """`gpus`: for the full name of each GPU among the devices, the index of the physical one."""
        self._name, self._options, self._gpus = name, options, gpus
        self.last: GraphCall | Recorder | None = None
        """The last call that has finished."""

    def of_graph(
        self, shards: Sequence[Shard], in_turn: bool, traces: Callable[[], int]
    ) -> AbstractContextManager[GraphCall | None]:
        """What times a call in one graph, where somebody hears of it."""
        listeners = self._listeners()
        if not self._options.report and not listeners:
            return nullcontext()
        keep = self._keep if self._options.report else None
        return GraphCall(shards, in_turn, traces(), self._gpus, listeners, keep)

    @contextmanager
    def of_chunks(self, traces: Callable[[], int]) -> Iterator[Callable[[Event], None]]:
        """What hears of a call in chunks."""
        listeners = self._listeners()
        if not self._options.report:
            yield _telling(listeners)
            return
        recorder = Recorder("chunks", traces(), self._gpus)
        try:
            with recorder.meter:
                yield _telling((recorder, *listeners))
        finally:
            self._keep(recorder)

    def _listeners(self) -> tuple[Callable[[Event], object], ...]:
        """Who hears of a call besides its report."""
        progress = self._options.progress
        return (ProgressBar(self._name),) if progress is True else (progress,) if progress else ()

    def _keep(self, call: GraphCall | Recorder) -> None:
        self.last = call


def _telling(listeners: Sequence[Callable[[Event], object]]) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell
