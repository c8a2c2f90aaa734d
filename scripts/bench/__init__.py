"""One module for each question about loaderpool, with its bar and its last result in the docstring: see `run`."""
