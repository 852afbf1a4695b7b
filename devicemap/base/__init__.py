"""Options, devices and the structure of data: what every other package relies on.

In:  the user's options, names of devices, and nests.
Out: checked `Options`, full device names, and nests of tuples and dicts whose leaves are tensors.
"""
