"""Durations that somebody gives, task by task or op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.company import Company
from moegen.graph.task import Task, TaskId
from moegen.sim.capacities import NOTHING, Capacities, Duplex, InCompany, InUse
from moegen.sim.cost import Cost, CostModel


class Fixed(CostModel):
    """Durations by task or by op. Made by :meth:`CostModel.fixed`."""

    def __init__(
        self,
        durations: Mapping[TaskId | str, float],
        demands: Mapping[TaskId | str, Mapping[str, float]],
        capacities: Mapping[str, float],
        duplex: float | Mapping[str, float] | None,
        provenance: str,
        company: Sequence[Company] = (),
    ) -> None:
        self._durations = {
            k: number(v, f"the duration of {k}", at_least=0) for k, v in durations.items()
        }
        self._demands = dict(demands)
        self._provenance = provenance
        self._costs: dict[tuple[TaskId | str, TaskId | str | None], Cost] = {}
        for name, rate in capacities.items():
            number(rate, f"the capacity of {name}", above=0)
        asked = {r for d in self._demands.values() for r in d}
        if not asked <= capacities.keys():
            missing = ", ".join(sorted(asked - capacities.keys()))
            raise InvalidInput(f"tasks draw on {missing}, whose capacity is not given")
        full = {name: float(rate) for name, rate in capacities.items()}
        if company and duplex is not None:
            raise InvalidInput("give duplex or company, not both: each says what copies share")
        self.company = tuple(company)
        self._capacities: Capacities = (
            InCompany(full, self.company) if company else Duplex(full, _limits(duplex))
        )

    def __repr__(self) -> str:
        return f"CostModel.fixed({len(self._durations)} durations)"

    def capacities(self, in_use: InUse = NOTHING) -> Mapping[str, float]:
        return self._capacities.of(in_use)

    def capacities_of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        return self._capacities.of_many(names, draws)

    def estimate(self, task: Task) -> Cost:
        given, drawn = _key(self._durations, task.id), _key(self._demands, task.id)
        if given is None:
            if task.work is not None and task.work.empty:
                return Cost(0.0, self._provenance)
            raise InvalidInput(
                f"no duration is given for {task.id}: give one for its id or its op {task.id.op!r}"
            )
        if (given, drawn) not in self._costs:
            demands = {} if drawn is None else self._demands[drawn]
            cost = Cost(self._durations[given], self._provenance, demands)
            self._costs[given, drawn] = cost
        return self._costs[given, drawn]


def _key(table: Mapping[TaskId | str, Any], task_id: TaskId) -> TaskId | str | None:
    """Under what a task is found: its id, its id in step 0, or its op."""
    if task_id in table:
        return task_id
    if task_id.step and (first := task_id._replace(step=0)) in table:
        return first
    return task_id.op if task_id.op in table else None


def _limits(duplex: float | Mapping[str, float] | None) -> Mapping[str, float]:
    if duplex is None:
        return {}
    if not isinstance(duplex, Mapping):
        number(duplex, "duplex", above=0)
        return {"h2d": duplex, "d2h": duplex}
    for name, limit in duplex.items():
        if name not in ("h2d", "d2h"):
            raise InvalidInput(f"duplex limits h2d and d2h, got {name!r}")
        number(limit, f"duplex of {name}", above=0)
    return duplex
