"""The tests' harness: children with a deadline, a guard against what is left behind, and looks into `/proc`."""
