"""Everything devicemap uses of TensorFlow that is not public; each entry says why no public name serves.

`tests/test_internals.py` fails the day one of them goes.
"""
