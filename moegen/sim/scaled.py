"""Cost models that rest on another one, and give more or less of each task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.graph.task import Task
from moegen.sim.capacities import NOTHING, InUse
from moegen.sim.cost import Cost, CostModel, checked_cost

if TYPE_CHECKING:
    import pandas as pd


class Wrapped(CostModel):
    """Another cost model as it is; subclasses change something of it.

    Attributes
    ----------
    of : CostModel
        The other one.
    """

    def __init__(self, cost: CostModel) -> None:
        self.of = checked_cost(cost)
        self.by_work, self.company = cost.by_work, cost.company
        self.latencies = cost.latencies

    def __repr__(self) -> str:
        return repr(self.of)

    @property
    def hw(self) -> Any:
        """The machine that the other one is of; None if of none."""
        return getattr(self.of, "hw", None)

    def estimate(self, task: Task) -> Cost:
        return self.of.estimate(task)

    def capacities(self, in_use: InUse = NOTHING) -> Mapping[str, float]:
        return self.of.capacities(in_use)

    def capacities_of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        return self.of.capacities_of_many(names, draws)

    def loads(self, cost: Cost) -> dict[str, float]:
        return self.of.loads(cost)

    def spread(self, task: Task) -> float:
        return self.of.spread(task)

    def domain(self) -> pd.DataFrame:
        return self.of.domain()


class Scaled(Wrapped):
    """Another cost model with more or less of each task; subclasses say how much.

    A task with a factor of 2 is twice as much of everything: it takes twice as long, alone and
    in company, and draws as much a second as before. The issuing thread takes what it took.
    """

    @abstractmethod
    def factor(self, task: Task) -> float:
        """What a task's duration and demands are multiplied by."""

    def estimate(self, task: Task) -> Cost:
        cost, factor = self.of.estimate(task), self.factor(task)
        return cost if factor == 1.0 else times(cost, factor)


class OpTimes(Scaled):
    """Durations of some ops times a factor each."""

    def __init__(self, cost: CostModel, factors: Mapping[str, float]) -> None:
        super().__init__(cost)
        self.factors = dict(factors)

    def __repr__(self) -> str:
        return f"{self.of!r} with {', '.join(f'{op} x{f:g}' for op, f in self.factors.items())}"

    def physical(self) -> CostModel:
        return OpTimes(self.of.physical(), self.factors)

    def factor(self, task: Task) -> float:
        return self.factors.get(task.id.op, 1.0)


def times(cost: Cost, factor: float) -> Cost:
    """A cost with ``factor`` times the seconds and the demands, handed over as before."""
    demands = {name: units * factor for name, units in cost.demands.items()}
    return replace(cost, seconds=cost.seconds * factor, demands=demands)
