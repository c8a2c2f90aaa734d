"""The supervisor: a clean, single-threaded process that forks the workers and deals them their tickets."""
