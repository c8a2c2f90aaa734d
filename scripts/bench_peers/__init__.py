"""loaderpool beside its peers and the limits of the machine, on the same work: see scripts/bench/peers."""
