"""steady(): the period of a step that is repeated for ever, and what would shorten it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from moegen.errors import GraphError
from moegen.graph.passes import with_slots
from moegen.graph.task import EdgeKind, TaskGraph, TaskId
from moegen.sim.cost import CostModel
from moegen.sim.cycles import Cycle, critical_waits, greatest_ratio, on_every_cycle
from moegen.sim.estimates import estimates
from moegen.sim.maxplus import refuse_deadlock
from moegen.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd


def steady(g: TaskGraph, cost: CostModel) -> Steady:
    """The period of a step repeated for ever, without sharing, and its sensitivities.

    In the long run step k ends ``period_s`` after step k - 1, or m steps end m periods after the
    m before. The period is the greatest mean of a cycle: of all ways round, from a task along
    waits back to itself some steps later, the one with the most seconds a step::

        period = max over cycles of (seconds of its tasks) / (steps that it spans)

    which is the eigenvalue of the step's max-plus matrix (Baccelli, Cohen, Olsder and Quadrat,
    Synchronization and Linearity, chapter 3). A lane's own queue is such a cycle, over one step.

    Parameters
    ----------
    g : TaskGraph
        The graph of one step, bound to a shape if the cost model goes by work.
    cost : CostModel

    Returns
    -------
    Steady

    Raises
    ------
    GraphError
        If the graph is unrolled, or has no tasks.
    DeadlockError
        If edges contradict the order within a lane.
    """
    if g.n_steps != 1 or not len(g):
        raise GraphError(
            f"a steady state is that of one step repeated, but the graph has {g.n_steps} steps "
            f"and {len(g)} tasks: pass the graph of one step"
        )
    refuse_deadlock(g)
    costs, kinds = estimates(g, cost, 1)
    return _of(g, tuple(costs[k].seconds for k in kinds))


def _of(g: TaskGraph, seconds: tuple[float, ...]) -> Steady:
    waits = dict(enumerate(g.structure.with_lanes(later=True)))
    lanes = [Cycle(queue, 1) for queue in g.structure.lanes]
    fullest = max(lanes, key=lambda cycle: cycle.ratio(seconds))
    cycle, potential = greatest_ratio(g.structure.order, waits, seconds, fullest)
    tight = critical_waits(waits, seconds, potential, cycle.ratio(seconds))
    tasks = tuple(g.tasks[v].id for v in cycle.tasks)
    return Steady(cycle.ratio(seconds), tasks, cycle.steps, g, seconds, cycle, tight)


@dataclass(frozen=True, repr=False, eq=False)
class Steady:
    """Steady state of a repeated step, nobody slowing anybody down; see :func:`steady`.

    Sensitivities say by how much the period *shortens* when tasks take less time, for small
    changes. On a single critical cycle over k steps that is 1/k for each of its tasks and 0 for
    all others. Where several cycles are critical, each of them has to shorten: what is given is
    the least over all of them, so that a task which one of them goes without has 0.

    Attributes
    ----------
    period_s : float
        Seconds from one step to the next.
    critical : tuple of TaskId
        The tasks of a critical cycle in the order in which they run; the first waits for the
        last, ``critical_steps`` steps before.
    critical_steps : int
        Steps that this cycle spans.
    """

    period_s: float
    critical: tuple[TaskId, ...]
    critical_steps: int
    _g: TaskGraph = field(repr=False)
    _seconds: tuple[float, ...] = field(repr=False)
    _cycle: Cycle = field(repr=False)
    _waits: Mapping[int, tuple[int, ...]] = field(repr=False)

    @property
    def unique(self) -> bool:
        """Whether there is one critical cycle only."""
        return sum(map(len, self._waits.values())) == len(self._cycle.tasks)

    @cached_property
    def by_task(self) -> pd.DataFrame:
        """One row a task: its id, ``lane``, ``seconds``, and ``shortens``.

        ``shortens`` is how many seconds the period loses for each second taken off the task.
        """
        import pandas as pd

        frame = pd.DataFrame([t.id for t in self._g], columns=list(TaskId._fields))
        frame["lane"] = [t.lane.value for t in self._g]
        frame["seconds"] = self._seconds
        shortens = np.zeros(len(self._g))
        common = [v for v in self._common if self._seconds[v]]  # or there is nothing to take off
        if common:  # all are on the same cycles
            shortens[common] = self._least(common[:1], [1.0] * len(self._g))
        frame["shortens"] = shortens
        return frame

    @cached_property
    def by_op(self) -> pd.DataFrame:
        """One row an op, those that shorten the period most first; columns as ``by_lane``."""
        return self._by([t.id.op for t in self._g], "op")

    @cached_property
    def by_lane(self) -> pd.DataFrame:
        """One row a lane: how many ``tasks`` it has, and their ``seconds`` in a step.

        ``shortens`` is how many seconds the period loses for each second taken off every one of
        its tasks; ``share`` by which part of itself the period shortens when all of them take
        less by a small part: 0.7 means 0.7% for 1%.
        """
        return self._by([t.lane.value for t in self._g], "lane")

    @cached_property
    def by_slot(self) -> pd.DataFrame:
        """One row a ring of slots: what one slot more does to the period.

        ``slots`` of so many ``bytes`` each lie ``where``; with one more the period is
        ``period_s``, shorter by ``gain_s``. Both are NaN where a step uses no more slots than
        there are: a step's graph cannot have more.
        """
        import pandas as pd

        rows = []
        for name, ring in self._g.rings.items():
            if ring.slots == 0:
                continue  # never used again, so nothing waits for it
            period_s = np.nan
            if ring.slots < ring.uses:
                period_s = self.period_s
                if name in self._critical_rings:
                    more = with_slots(self._g, name, ring.slots + 1)
                    period_s = min(period_s, _of(more, self._seconds).period_s)
            gain_s = self.period_s - period_s
            rows.append((name, ring.slots, ring.slot_bytes, ring.where, period_s, gain_s))
        columns = ["ring", "slots", "bytes", "where", "period_s", "gain_s"]
        frame = pd.DataFrame(rows, columns=columns).set_index("ring")
        return frame.sort_values("gain_s", ascending=False, kind="stable")

    @cached_property
    def _critical_rings(self) -> set[str]:
        """Rings for whose slots some critical cycle waits: no other can shorten the period."""
        n = len(self._g)
        waits = {(u % n, v, int(u < 0)) for v, us in self._waits.items() for u in us}
        return {
            e.reason.buffer
            for e, pair in zip(self._g.edges, self._g.structure.edges, strict=True)
            if e.reason.kind is EdgeKind.BUFFER and pair in waits
        }

    def _by(self, names: Sequence[Hashable], title: str) -> pd.DataFrame:
        import pandas as pd

        members: dict[Hashable, list[int]] = {}
        for v, name in enumerate(names):
            members.setdefault(name, []).append(v)
        rows = []
        for name, tasks in members.items():
            shortens = self._least(tasks, [float(x > 0) for x in self._seconds])
            critical_s = self._least(tasks, self._seconds)
            share = critical_s / self.period_s if self.period_s else 0.0
            rows.append((name, len(tasks), sum(self._seconds[v] for v in tasks), shortens, share))
        frame = pd.DataFrame(rows, columns=[title, "tasks", "seconds", "shortens", "share"])
        frame = frame.set_index(title)
        return frame.sort_values("share", ascending=False, kind="stable")

    @cached_property
    def _common(self) -> list[int]:
        """The tasks of every critical cycle."""
        if self.unique:
            return list(self._cycle.tasks)
        return sorted(on_every_cycle(self._waits, self._cycle, len(self._g)))

    def _least(self, tasks: Collection[int], weights: Sequence[float]) -> float:
        """The least that tasks weigh a step, over all critical cycles."""
        chosen = set(tasks)
        if not chosen.intersection(self._cycle.tasks):
            return 0.0
        less = [-weights[v] if v in chosen else 0.0 for v in range(len(self._g))]
        cycle = self._cycle
        if not self.unique:
            order = [v for v in self._g.structure.order if v in self._waits]
            cycle, _ = greatest_ratio(order, self._waits, less, cycle)
        return abs(cycle.ratio(less))

    def __repr__(self) -> str:
        name = self._g.model.name if self._g.model is not None else "hand-made"
        shares = self.by_lane["share"].to_dict()
        lanes = [f"{lane} {share:.0%}" for lane, share in shares.items() if share > 0.005]
        several = "" if self.unique else "; other cycles are as long"
        return (
            f"<Steady {name} {self._g.phase}: period {format_seconds(self.period_s)}, unshared; "
            f"critical: {len(self.critical)} tasks over {self.critical_steps} step(s), from "
            f"{self.critical[0]} to {self.critical[-1]}{several}; by lane "
            f"{', '.join(lanes) or 'none alone'}>"
        )
