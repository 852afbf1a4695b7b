"""Training of Keras models on several devices, and placement of variables."""
