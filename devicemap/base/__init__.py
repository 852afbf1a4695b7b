"""Options, devices and the structure of data."""
