"""Plots. Each draws where it is told to and gives back what it drew on; none calls show()."""

from moegen.plot.gantt import gantt, predicted_and_measured
from moegen.plot.style import COLOURS
from moegen.plot.throughput import throughput

__all__ = ["COLOURS", "gantt", "predicted_and_measured", "throughput"]
