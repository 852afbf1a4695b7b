"""Types that calls take, report and return, for type hints."""

from devicemap.bench.measurements import BenchmarkResult
from devicemap.devices import Device
from devicemap.events import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
    FailedRow,
    RowFailed,
    Shard,
)
from devicemap.inspect.pipelines import PipelinePlan, PipelineReport
from devicemap.inspect.plan import Plan
from devicemap.inspect.report import Report
from devicemap.inspect.training import TrainingReport
from devicemap.inspect.verify import Verification
from devicemap.pipelines.split import Stages
from devicemap.store.results import Results

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
    "FailedRow",
    "PipelinePlan",
    "PipelineReport",
    "Plan",
    "Report",
    "Results",
    "RowFailed",
    "Shard",
    "Stages",
    "TrainingReport",
    "Verification",
]
