"""Predicted against measured: how wrong a prediction was, where, and why."""

from moegen.comparison.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
