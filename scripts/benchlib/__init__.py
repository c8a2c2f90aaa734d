"""What measures: questions and rows, works, windows, limits, and runs in fresh processes. Prints and judges nothing.

`bench` (loaderpool against its bars) and `bench_peers` (loaderpool beside others) stand above it. Begin with `model`.
"""
