"""What everything else stands on: options, devices, structure of data."""
