"""Events of a call -> a progress bar, a report, its plots; and what GPUs did meanwhile."""

from devicemap.tell.report.recorder import Observers
from devicemap.tell.report.report import Report

__all__ = ["Observers", "Report"]
