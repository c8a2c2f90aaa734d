"""Loaders in TensorFlow, Keras, PyTorch and JAX: the only room where these are imported.

Runs in: the trainer. In come passes of a loader, out go a `tf.data.Dataset`, tensors, what `fit` takes, Keras callbacks
and Sequences' settings. It may import everything but `tools`. Open first: `conversion`, then `tensorflow`.
"""
