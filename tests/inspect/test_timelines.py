"""Spans, lanes, unions of intervals, and the Chrome trace."""

from __future__ import annotations

import itertools

from histories import device, history
from hypothesis import given
from hypothesis import strategies as st

from devicemap.inspect.render import short_names
from devicemap.inspect.timeline import Span, lanes_of, spans_of, union_seconds
from devicemap.types import CallFinished, CallStarted, ChunkFinished, ChunkStarted, Shard

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda p: (float(p[0]), float(p[0] + p[1]))))


@given(INTERVALS)
def test_a_union_is_as_long_as_the_seconds_that_it_covers(intervals: list[tuple[float, float]]) -> None:
    covered = {second for start, stop in intervals for second in range(int(start), int(stop))}
    assert union_seconds(intervals) == len(covered)


@given(INTERVALS)
def test_spans_of_one_lane_never_overlap_and_no_lane_is_wasted(intervals: list[tuple[float, float]]) -> None:
    spans = [Span(Shard(device(i % 2), i, i + 1), *times, "finished") for i, times in enumerate(intervals)]
    lanes = lanes_of(spans)
    for (a, lane_a), (b, lane_b) in itertools.combinations(zip(spans, lanes), 2):
        if (a.shard.device, lane_a) == (b.shard.device, lane_b):
            assert a.finished_seconds <= b.started_seconds or b.finished_seconds <= a.started_seconds
    for name in {span.shard.device for span in spans}:
        own = [span for span in spans if span.shard.device == name]
        at_once = max(sum(a.started_seconds <= b.started_seconds <= a.finished_seconds for a in own) for b in own)
        assert max(lane for span, lane in zip(spans, lanes) if span.shard.device == name) < at_once


def test_spans_of_a_call_that_ends_before_its_chunks() -> None:
    shard, other = Shard(device(0), 0, 3), Shard(device(1), 3, 6)
    events = [
        CallStarted(0.0, 6, (device(0), device(1))),
        ChunkStarted(0.5, shard, 0.0),
        ChunkStarted(0.75, other, 0.0),
        ChunkFinished(1.0, shard, 0.5),
        CallFinished(2.0, KeyboardInterrupt()),
    ]
    assert spans_of(events) == (Span(shard, 0.5, 1.0, "finished"), Span(other, 0.75, 2.0, "unfinished"))
    assert spans_of(events)[1].seconds == 1.25


def test_a_chunk_that_runs_twice_on_a_device_has_two_spans() -> None:
    spans = spans_of(history([(4, 1.0)], devices=1, failing={0}))
    assert [(span.outcome, span.started_seconds, span.finished_seconds) for span in spans] == [
        ("failed", 0.0, 1.0),
        ("finished", 1.0, 2.0),
    ]


def test_short_names_tell_devices_apart() -> None:
    two_hosts = [f"/job:worker/replica:0/task:{task}/device:GPU:0" for task in range(2)]
    assert [*short_names(two_hosts).values()] == ["/job:worker/task:0/GPU:0", "/job:worker/task:1/GPU:0"]
    assert short_names([device(0), device(1, "CPU")]) == {device(0): "GPU:0", device(1, "CPU"): "CPU:1"}
