"""One module for each loader; benchlib/peer.py says what is in them."""
