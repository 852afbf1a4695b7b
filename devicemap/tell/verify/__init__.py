"""`DeviceMap.verify`: the same rows in several ways, and what their differences mean."""
