"""Trainings in which one thing is wrong, for `scripts/verdicts`."""
