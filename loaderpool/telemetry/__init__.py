"""Counters and what is shown of them."""
