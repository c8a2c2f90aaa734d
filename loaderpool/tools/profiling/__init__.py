"""Where a loader's functions spend their time, by line: sampled in its workers, merged in the process that asks."""
