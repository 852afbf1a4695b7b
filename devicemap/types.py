"""Types that calls take, report and return, for type hints. The reference names the calls."""

from devicemap.base.devices import Device
from devicemap.bench.measurements import BenchmarkResult
from devicemap.events import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
    Shard,
)
from devicemap.store.results import Results
from devicemap.tell.plan.pipeline import PipelinePlan
from devicemap.tell.plan.plan import Plan
from devicemap.tell.report.report import Report
from devicemap.tell.report.training import TrainingReport
from devicemap.tell.verify import Verification

__all__ = [
    "BenchmarkResult",
    "CallFinished",
    "CallStarted",
    "ChunkFailed",
    "ChunkFinished",
    "ChunkRetried",
    "ChunkStarted",
    "Device",
    "DeviceLost",
    "Event",
    "PipelinePlan",
    "Plan",
    "Report",
    "Results",
    "Shard",
    "TrainingReport",
    "Verification",
]
