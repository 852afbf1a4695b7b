"""`devicemap.benchmark`: eager code, a graph on one device, and all devices."""
