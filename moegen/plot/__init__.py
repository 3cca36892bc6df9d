"""Plots. Each draws where it is told to and gives back what it drew on; none calls show()."""

from moegen.plot.bands import bands
from moegen.plot.causal import causal
from moegen.plot.comparison import comparison
from moegen.plot.dag import layer_dag
from moegen.plot.gantt import gantt, predicted_and_measured
from moegen.plot.pareto import frontier, pareto
from moegen.plot.sensitivity import sensitivities
from moegen.plot.style import COLOURS
from moegen.plot.throughput import throughput
from moegen.plot.usage import traffic, utilization
from moegen.plot.whatifs import what_ifs

__all__ = [
    "COLOURS",
    "bands",
    "causal",
    "comparison",
    "frontier",
    "gantt",
    "layer_dag",
    "pareto",
    "predicted_and_measured",
    "sensitivities",
    "throughput",
    "traffic",
    "utilization",
    "what_ifs",
]
