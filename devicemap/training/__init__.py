"""Keras models that train on several devices, and where variables live."""
