"""Demo of scripts/quickstart: a folder of JPEG files, a Keras network, and two ways to feed it."""
