"""`devicemap.benchmark`: eager against graph, one device against all of them."""
