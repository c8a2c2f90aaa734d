"""Loaders in TensorFlow and Keras: the only room where these are imported.

Runs in: the trainer. In come passes of a loader, out go a `tf.data.Dataset`, Keras callbacks and Sequences' settings.
It may import everything but `tools`. Open first: `tensorflow`.
"""
