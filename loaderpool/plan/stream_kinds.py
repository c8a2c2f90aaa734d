"""Kinds of random streams. Streams of two kinds never overlap."""

SAMPLE, BATCH, LANE, PASS, ITEM = 1, 2, 3, 4, 5
