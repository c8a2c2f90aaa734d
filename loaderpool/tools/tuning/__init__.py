"""Finds how many workers a loader should have, by measuring it; decides apart from measuring, and prints nothing."""

from loaderpool.tools.tuning.cpus import CpuBudget, cpu_budget
from loaderpool.tools.tuning.measure import Watcher, default_counts, measure, measure_counts
from loaderpool.tools.tuning.recommend import Comparison, Recommendation, recommend
from loaderpool.tools.tuning.window import Measurement, Window

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
