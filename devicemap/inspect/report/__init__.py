"""Events of a call -> a progress bar, a report, its plots; and what GPUs did meanwhile."""
