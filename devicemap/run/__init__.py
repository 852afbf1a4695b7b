"""Run a compiled map on data.

In:  a `Program`, the user's data, and observers of calls.
Out: the results of all rows, gathered on the output device, or chunk by chunk.

`mapper.py` chooses an engine for each call. `graph_engine.py` runs one graph with a shard per device. `chunk_engine.py` runs a
scheduler, which reads the source and sends each chunk to the queue of an idle device, and yields the results in order.
"""
