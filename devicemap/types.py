"""Types of what calls take, report and return. What makes them is named in the reference."""

from devicemap.base.devices import Device
from devicemap.bench.measurements import BenchmarkResult, Measurement
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
from devicemap.tell.plan.pipeline import PipelinePlan, StagePlan
from devicemap.tell.plan.plan import (
    Captured,
    ControlEdge,
    DevicePlan,
    Handling,
    Plan,
    RandomOps,
)
from devicemap.tell.report.accounts import DeviceReport
from devicemap.tell.report.pipeline import PipelineReport, StageCall
from devicemap.tell.report.report import Report
from devicemap.tell.report.timeline import Span
from devicemap.tell.report.training import DeviceShare, TrainingReport
from devicemap.tell.verify import Finding, Verification

__all__ = [
    "BenchmarkResult",
    "CallFinished",
    "CallStarted",
    "Captured",
    "ChunkFailed",
    "ChunkFinished",
    "ChunkRetried",
    "ChunkStarted",
    "ControlEdge",
    "Device",
    "DeviceLost",
    "DevicePlan",
    "DeviceReport",
    "DeviceShare",
    "Event",
    "Finding",
    "Handling",
    "Measurement",
    "PipelinePlan",
    "PipelineReport",
    "Plan",
    "RandomOps",
    "Report",
    "Results",
    "Shard",
    "Span",
    "StageCall",
    "StagePlan",
    "TrainingReport",
    "Verification",
]
