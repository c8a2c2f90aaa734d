"""Adapters from loaders to TensorFlow, Keras, PyTorch and JAX; no other room imports these.

Runs in: the main process. Turns passes of a loader into a `tf.data.Dataset`, tensors, or the input
of `fit`. Also holds the Keras callbacks and the hooks of a Sequence. May import all rooms but
`tools`. Open first: `conversion`, then `tensorflow`.
"""
