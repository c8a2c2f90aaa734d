"""A process of its own that reads a stream: what is said over its socket (`messages`), and both ends of that."""
