"""Finds how many workers a loader should have, by measuring it; decides apart from measuring, and prints nothing."""

from loaderpool.tuning.cpus import CpuBudget, cpu_budget
from loaderpool.tuning.measure import Watcher, default_counts, measure, measure_counts
from loaderpool.tuning.recommend import Comparison, Recommendation, recommend
from loaderpool.tuning.window import Measurement, Window

__all__ = [
    "Comparison",
    "CpuBudget",
    "Measurement",
    "Recommendation",
    "Watcher",
    "Window",
    "cpu_budget",
    "default_counts",
    "measure",
    "measure_counts",
    "recommend",
]
