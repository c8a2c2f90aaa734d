"""Pure functions from (seed, epoch, position) to indices and random streams: the same bits wherever they run."""
