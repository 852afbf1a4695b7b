"""Pipelines: models in stages on several devices, which work on different microbatches at the same time."""
