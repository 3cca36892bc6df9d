"""Plan, predict and run offline inference of Mixture-of-Experts models larger than the GPU.

One task graph, two clocks: :func:`build` makes the graph of a step, :func:`simulate` runs it
on a model of the machine, :class:`Engine` runs the same graph for real, and both return a
:class:`Timeline`.

A name is imported from its home when it is first used. So ``import moegen`` is instant and
loads neither torch nor transformers, and planning works where they are not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; _HOME is what runs
    from types import ModuleType

    from moegen import plot
    from moegen.causal_profiling import causal
    from moegen.comparison import compare
    from moegen.economics import tokens_per_joule, tokens_per_usd
    from moegen.errors import DeadlockError, Infeasible, InvalidInput, MachineError, MoegenError
    from moegen.exec.engine import Engine
    from moegen.exec.table import profile
    from moegen.graph.build import build
    from moegen.graph.hardware import HardwareSpec
    from moegen.graph.memory import Ledger, memory
    from moegen.graph.model import ModelSpec
    from moegen.graph.shape import Shape
    from moegen.graph.strategy import Plan, Strategy
    from moegen.graph.task import EdgeKind, Lane, Task, TaskGraph, TaskId
    from moegen.graph.workload import Workload
    from moegen.sim.bounds import bound_s, critical_path_s
    from moegen.sim.candidates import bands, best_probability
    from moegen.sim.cost import CostModel
    from moegen.sim.delays import delay_slopes
    from moegen.sim.engine import simulate
    from moegen.sim.search import plan
    from moegen.sim.spread import Spread
    from moegen.sim.steady import steady
    from moegen.sim.sweep import sweep
    from moegen.sim.uncertainty import uncertainty
    from moegen.timeline import Timeline
    from moegen.whatif import what_if, what_ifs

    __version__: str

__all__ = [
    "CostModel",
    "DeadlockError",
    "EdgeKind",
    "Engine",
    "HardwareSpec",
    "Infeasible",
    "InvalidInput",
    "Lane",
    "Ledger",
    "MachineError",
    "ModelSpec",
    "MoegenError",
    "Plan",
    "Shape",
    "Spread",
    "Strategy",
    "Task",
    "TaskGraph",
    "TaskId",
    "Timeline",
    "Workload",
    "bands",
    "best_probability",
    "bound_s",
    "build",
    "causal",
    "compare",
    "critical_path_s",
    "delay_slopes",
    "memory",
    "plan",
    "plot",
    "profile",
    "simulate",
    "steady",
    "sweep",
    "tokens_per_joule",
    "tokens_per_usd",
    "uncertainty",
    "what_if",
    "what_ifs",
]

# The extra `run` brings these; without it everything but running works.
_RUN_EXTRA = {"torch", "transformers", "safetensors"}

_HOME = {
    "CostModel": "moegen.sim.cost",
    "DeadlockError": "moegen.errors",
    "EdgeKind": "moegen.graph.task",
    "Engine": "moegen.exec.engine",
    "HardwareSpec": "moegen.graph.hardware",
    "Infeasible": "moegen.errors",
    "InvalidInput": "moegen.errors",
    "Lane": "moegen.graph.task",
    "Ledger": "moegen.graph.memory",
    "MachineError": "moegen.errors",
    "ModelSpec": "moegen.graph.model",
    "MoegenError": "moegen.errors",
    "Plan": "moegen.graph.strategy",
    "Shape": "moegen.graph.shape",
    "Spread": "moegen.sim.spread",
    "Strategy": "moegen.graph.strategy",
    "Task": "moegen.graph.task",
    "TaskGraph": "moegen.graph.task",
    "TaskId": "moegen.graph.task",
    "Timeline": "moegen.timeline",
    "Workload": "moegen.graph.workload",
    "bands": "moegen.sim.candidates",
    "best_probability": "moegen.sim.candidates",
    "bound_s": "moegen.sim.bounds",
    "build": "moegen.graph.build",
    "causal": "moegen.causal_profiling",
    "compare": "moegen.comparison",
    "critical_path_s": "moegen.sim.bounds",
    "delay_slopes": "moegen.sim.delays",
    "memory": "moegen.graph.memory",
    "plan": "moegen.sim.search",
    "profile": "moegen.exec.table",
    "simulate": "moegen.sim.engine",
    "steady": "moegen.sim.steady",
    "sweep": "moegen.sim.sweep",
    "tokens_per_joule": "moegen.economics",
    "tokens_per_usd": "moegen.economics",
    "uncertainty": "moegen.sim.uncertainty",
    "what_if": "moegen.whatif",
    "what_ifs": "moegen.whatif",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version  # slow, seldom asked

        try:
            value = version("moegen")
        except PackageNotFoundError:  # the source tree is on the path, nothing is installed
            value = "0+unknown"
    elif name == "plot":
        value = import_module("moegen.plot")
    elif name in _HOME:
        value = getattr(_import_home(name), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next use is a plain attribute
    return value


def _import_home(name: str) -> ModuleType:
    try:
        return import_module(_HOME[name])
    except ModuleNotFoundError as error:
        if error.name not in _RUN_EXTRA:
            raise
        raise ModuleNotFoundError(
            f"moegen.{name} needs {error.name}, which is not installed: pip install 'moegen[run]'",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
