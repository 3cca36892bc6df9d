"""What the tasks of a simulated run cost: kept with its timeline, and saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from moegen.errors import InvalidInput, MoegenError
from moegen.graph.checks import wholes
from moegen.graph.company import Company
from moegen.graph.latencies import Latencies
from moegen.graph.task import Task, TaskGraph, TaskId
from moegen.sim.capacities import NOTHING, InUse
from moegen.sim.cost import Cost, CostModel


class Recorded(CostModel):
    """The costs of a run's tasks, and the rule by which they shared the machine.

    Made by :func:`moegen.simulate`, and from a file with its timeline. A step beyond those of the
    run costs what the last one did.

    Parameters
    ----------
    graph : TaskGraph
        What was run.
    costs : sequence of Cost
        One of each kind of task.
    kinds : sequence of int, shape [steps * n]
        The kind of each of the graph's n tasks in program order, step after step.
    rule : CostModel
        Gives capacities.
    shared : bool
        Whether the run's tasks shared them: False if nobody disturbed anybody.
    """

    def __init__(
        self,
        graph: TaskGraph,
        costs: Sequence[Cost],
        kinds: Sequence[int],
        rule: CostModel,
        *,
        shared: bool,
    ) -> None:
        self.graph, self.costs, self.rule, self.shared = graph, tuple(costs), rule, shared
        self.company, self.latencies = rule.company, rule.latencies
        self._kinds = kinds

    def __repr__(self) -> str:
        return f"<Recorded costs of {len(self.costs)} kinds of tasks, {self.n_steps} step(s)>"

    @property
    def n_steps(self) -> int:
        """Steps that costs are told apart for."""
        return len(self._kinds) // max(1, len(self.graph))

    def capacities(self, in_use: InUse = NOTHING) -> Mapping[str, float]:
        return self.rule.capacities(in_use)

    def capacities_of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        return self.rule.capacities_of_many(names, draws)

    def estimate(self, task: Task) -> Cost:
        step, first = 0, task.id
        if self.graph.n_steps == 1:
            step, first = task.id.step, task.id._replace(step=0)
        place = self._places.get(first)
        if place is None:
            raise InvalidInput(f"{task.id} is no task of the run that the costs are of")
        return self.costs[self.kinds(step)[place]]

    @cached_property
    def _places(self) -> dict[TaskId, int]:
        return {t.id: i for i, t in enumerate(self.graph)}

    def kinds(self, step: int) -> Sequence[int]:
        """The kind of each task of a step, shape [n]."""
        begin = min(step, self.n_steps - 1) * len(self.graph)
        return self._kinds[begin : begin + len(self.graph)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the graph; steps that are alike are said once."""
        n, kinds = len(self.graph), list(self._kinds)
        alike = all(kinds[:n] == kinds[at : at + n] for at in range(n, len(kinds), n))
        capacities = dict(self.rule.capacities())
        company = [vars(entry) for entry in self.rule.company]
        # Beside both of their full loads: what is left is the rule of the two directions alone.
        directions = {r: [capacities[r]] for r in ("h2d", "d2h") if r in capacities}
        both = capacities if company else self.rule.capacities(directions)
        return {
            "costs": [
                [c.seconds, str(c.provenance), dict(c.demands), c.issue_s, c.turn_s, dict(c.keeps)]
                for c in self.costs
            ],
            "kinds": kinds[:n] if alike else kinds,
            "capacities": capacities,
            "duplex": {r: rate for r, rate in both.items() if rate != capacities[r]},
            "company": company,
            "latencies": vars(self.rule.latencies),
            "shared": self.shared,
        }

    @classmethod
    def from_dict(cls, graph: TaskGraph, data: Mapping[str, Any]) -> Recorded:
        """Inverse of :meth:`to_dict`.

        Raises
        ------
        InvalidInput
            If the data are not what it gave, or of another graph.
        """
        try:
            costs = [
                Cost(seconds, str(p), dict(demands), issue_s, turn_s, dict(keeps))
                for seconds, p, demands, issue_s, turn_s, keeps in data["costs"]
            ]
            kinds = wholes(data["kinds"], "kinds", at_most=len(costs) - 1)
            if len(kinds) % max(1, len(graph)) or bool(kinds) != bool(len(graph)):
                raise InvalidInput(f"it has {len(kinds)} kinds for {len(graph)} tasks a step")
            shared = data["shared"]
            if not isinstance(shared, bool):
                raise InvalidInput(f"shared must be true or false, got {shared!r}")
            company = [Company(**entry) for entry in data["company"]]
            rule = CostModel.fixed(
                {},
                capacities=data["capacities"],
                duplex=data["duplex"] or None,
                company=company,
            )
            rule.latencies = Latencies(**data["latencies"])
        except MoegenError as e:
            raise InvalidInput(f"the costs are damaged: {e}") from e
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InvalidInput(f"the costs are damaged: {type(e).__name__}: {e}") from e
        return cls(graph, costs, kinds, rule, shared=shared)
