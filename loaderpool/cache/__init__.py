"""Keeps what the user's first function gave, for all processes of a loader: in memory, or on disk."""
