"""Events of a call -> a progress bar, a report, its plots; and what GPUs did meanwhile."""

from devicemap.reporting.progress import ProgressBar
from devicemap.reporting.recording import GraphCall, Recorder
from devicemap.reporting.reports import Report

__all__ = ["GraphCall", "ProgressBar", "Recorder", "Report"]
