"""Serialization of the user's functions and source: pickled in the main process, and loaded in
others.

Runs in: the main process (`ship` and its helpers), and the supervisor, readers and workers without
a fork (`loaded`). Input: function and source as objects. Output: a shipment, which is a pickle, and
arrays that are in memory only once.

It may import `transport` and the rooms below. Open first: `ship`.
"""
