"""Rows, chunks and shards, and the datasets that they are read from."""
