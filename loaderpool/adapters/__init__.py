"""Loaders in TensorFlow and Keras; the only place where these are imported."""
