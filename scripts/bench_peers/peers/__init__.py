"""One module for each loader; bench_peers/peer.py says what is in them."""
