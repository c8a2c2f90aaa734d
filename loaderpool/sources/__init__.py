"""What a loader reads by index: sequences as they are, arrays and tables by row, columns zipped."""

from loaderpool.sources.recognise import Source, as_source

__all__ = ["Source", "as_source"]
