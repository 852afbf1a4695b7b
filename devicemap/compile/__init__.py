"""Turn the user's function into graphs that run on several devices.

In:  `fn`, the checked options, the specs of the data, and a `CallSpec`, which identifies one graph.
Out: a `ConcreteFunction`: of all rows with a `tf.device` block per slot, or of one chunk on one device.

`program.py` owns a `CompiledMap` per structure of data, which traces `fn` once (`trace.py`, `vectorize.py` or `row_loop.py`).
`audit.py` finds out how `fn` uses its captures, `replicas.py` copies these to devices, and `graph_builder.py` builds graphs.
"""
