"""Events of a call -> a progress bar, a report, its plots; and what GPUs did meanwhile."""

from devicemap.reporting.observing import Observers
from devicemap.reporting.reports import Report

__all__ = ["Observers", "Report"]
