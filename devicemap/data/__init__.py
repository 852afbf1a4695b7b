"""Take the user's data apart.

In:  a nest of tensors or arrays, or a `tf.data.Dataset`.
Out: `Rows`, flat leaves that share their first axis; or a `Source`, which is read chunk by chunk.
"""
