"""Models over devices: stages, microbatches, and how a model is cut into them."""
