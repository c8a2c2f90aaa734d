"""Finds how many workers and threads a loader should have by measuring it; prints nothing."""

from loaderpool.tools.tuning.cpus import CpuBudget, cpu_budget
from loaderpool.tools.tuning.measure import Watcher, measure, measure_settings
from loaderpool.tools.tuning.recommend import Comparison, Recommendation, recommend
from loaderpool.tools.tuning.setting import Setting, default_counts, settings_of
from loaderpool.tools.tuning.window import Measurement, Window

__all__ = [
    "Comparison",
    "CpuBudget",
    "Measurement",
    "Recommendation",
    "Setting",
    "Watcher",
    "Window",
    "cpu_budget",
    "default_counts",
    "measure",
    "measure_settings",
    "recommend",
    "settings_of",
]
