"""Why a prediction was wrong: its error in three parts, which sum to it exactly.

With P the predicted period and M the measured one, two more are simulated between them::

    R   the measured durations, nobody disturbing anybody: what graph and durations explain,
        and the issuing thread, where the prediction knows of it
    S   each task's alone-equivalent duration, sharing the machine as the prediction has it

    P - M  =  (P - S)  +  (S - R)  +  (R - M)
              task cost   scheduling   untracked
                          and          overhead
                          contention

A task's alone-equivalent duration is what it would have taken with nobody beside it. A task that
nobody disturbed took just that. One that others disturbed is given the median of those of its
kind (op and work) that nobody did, if a twentieth of them at least were so lucky: so what company
really costs is not confused with what the task costs. Else its duration is taken as so much
shorter as the cost model says that those who ran beside it slowed it down; a wrong rule then
shows as task cost, since nothing measured tells the two apart.

A duration lasts from the start that was recorded on the task's lane to its end. If the kernel
came late after that start, waiting for its launch, it is part of the duration. Where the
prediction knows what the issuing thread takes (`moegen.sim.issuing`), all three hand tasks over
as it says: what the thread takes is then no overhead that nobody tracked, what it takes beyond
that is. Its alone-equivalent duration is then that of the work: of a copy from its launch on, as
the replay has that, and of a task that lasted no longer than the thread kept it from ending what
was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from moegen.comparison.pairs import Pairs
from moegen.errors import InvalidInput
from moegen.sim.cost import Cost, CostModel
from moegen.sim.engine import run_lanes
from moegen.sim.issued import LAUNCHED_LAST, IssuedRun, issued
from moegen.sim.sharing import speeds_of

PARTS = ("task cost", "scheduling and contention", "untracked overhead")
# A task is disturbed if others drew on what it draws on for more than this share of its run.
_DISTURBED = 0.01
# How many of a kind must have run undisturbed for their median to stand for the others.
_ENOUGH = 0.05
# A task that lasted no longer than so many times what the thread held it for was held by that.
_HELD = 1.05
# An op whose durations are wrong by less than this share of the run, all together, is not tried.
_LEAST = 2e-5


class Split:
    """The parts of a period's error, and what each op has to do with the first.

    Parameters
    ----------
    pairs : Pairs
    predicted_period_s, measured_period_s : float

    Raises
    ------
    InvalidInput
        If the prediction does not say what its tasks cost.
    """

    def __init__(self, pairs: Pairs, predicted_period_s: float, measured_period_s: float) -> None:
        cost = pairs.predicted.cost
        if cost is None:
            raise InvalidInput(
                f"the first timeline is {pairs.predicted.source} and does not say what its tasks "
                f"cost alone, so its error cannot be split: give one that mg.simulate made, or a "
                f"CostModel in its place"
            )
        self._pairs, self._graph = pairs, pairs.measured.graph
        self._costs = cost.costs
        self._kinds = [kind for step in pairs.steps for kind in cost.kinds(int(step))]
        self._rule, self._shared = cost.rule, cost.shared
        self._period = _Period([pairs.measured.ids[i].step for i in pairs.after])
        self._predicted_period_s, self._measured_period_s = predicted_period_s, measured_period_s
        self._predicted_s = np.array([self._costs[k].seconds for k in self._kinds])

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of the period's error, predicted less measured, by part."""
        error_s = self._predicted_period_s - self._measured_period_s
        again_s, shared_s = self._of_ends
        task_cost_s = again_s - shared_s
        # P is simulated again over as many steps as were measured: what that changes is not what
        # tasks cost.
        replay_s = self._simulate(self._pairs.measured_s, alone=True)
        contention_s = (self._predicted_period_s - again_s) + (shared_s - replay_s)
        parts = (task_cost_s, contention_s, error_s - task_cost_s - contention_s)
        return dict(zip(PARTS, parts, strict=True))

    @cached_property
    def task_cost_s(self) -> dict[str, float]:
        """Seconds of the task cost by op.

        Each op is taken alone, twice: what the period changes by when its predicted durations
        take the place of the alone-equivalent ones, and when they leave the predicted ones. Half
        of both together is what it has to do with the error; what is then left, where ops hide
        one another, is divided in proportion. The order of ops does not matter. Ops whose
        durations are wrong by next to nothing are given nothing.
        """
        ops = self._pairs.ops
        changed_s = np.abs(self.alone_s - self._predicted_s)
        shares = dict.fromkeys(ops.tolist(), 0.0)
        lasted = {op: float(changed_s[ops == op].sum()) for op in shares}
        least_s = _LEAST * self._measured_period_s * self._period.n_steps
        moved = [op for op, seconds in lasted.items() if seconds > least_s]
        moved = moved or [max(lasted, key=lasted.__getitem__)]
        all_predicted_s, all_alone_s = self._of_ends
        total_s = all_predicted_s - all_alone_s
        if len(moved) == 1:
            return shares | {moved[0]: total_s}
        for op in moved:
            of = ops == op
            into = self._simulate(np.where(of, self._predicted_s, self.alone_s))
            out_of = self._simulate(np.where(of, self.alone_s, self._predicted_s))
            shares[op] = ((into - all_alone_s) + (all_predicted_s - out_of)) / 2
        weights = {op: abs(shares[op]) for op in moved}
        if not sum(weights.values()):
            weights = {op: lasted[op] for op in moved}
        left_s, weight = total_s - sum(shares.values()), sum(weights.values())
        for op in moved:
            shares[op] += left_s * weights[op] / weight
        return shares

    @cached_property
    def _of_ends(self) -> tuple[float, float]:
        """Periods with all durations predicted, and with all alone-equivalent."""
        return self._simulate(self._predicted_s), self._simulate(self.alone_s)

    def _simulate(self, seconds: np.ndarray, alone: bool = False) -> float:
        """The period with these durations; ``alone`` if nobody disturbs anybody."""
        # Where the prediction knows of the issuing thread, tasks are handed over all the same.
        latencies = self._rule.latencies if self._shared else None
        sharing = self._rule if self._shared and not alone else None
        of = self._graph, self._costs, self._kinds, seconds.tolist()
        return self._period.of(*run_lanes(*of, sharing, latencies))

    @cached_property
    def alone_s(self) -> np.ndarray:
        """How long each task would have taken alone, shape [N]."""
        pairs = self._pairs
        speeds, disturbed = self._company()
        alone = self._worked_s(speeds)
        undisturbed = disturbed <= _DISTURBED
        kinds = np.array(self._kinds)
        for kind in np.unique(kinds[~undisturbed]):
            of = kinds == kind
            known = of & undisturbed & pairs.counted
            if known.any() and known.sum() >= _ENOUGH * (of & pairs.counted).sum():
                alone[of & ~undisturbed] = np.median(alone[known])
        return alone

    def _worked_s(self, speeds: np.ndarray) -> np.ndarray:
        """Measured durations at full speed, without the wait for a launch.

        A task that lasted little longer than the issuing thread held it tells nothing of its
        work, which is then held to be what was predicted.
        """
        lasted_s, (launched_s, held_s) = self._pairs.measured_s, self._waits_s
        unknown = (lasted_s <= _HELD * held_s) | (lasted_s <= 2 * launched_s)
        predicted_s = np.minimum(lasted_s, self._predicted_s / speeds)
        return np.where(unknown, predicted_s, lasted_s - launched_s) * speeds

    @cached_property
    def _waits_s(self) -> tuple[np.ndarray, np.ndarray]:
        """For how long after its start, in the replay, each task could not work yet, since its
        launch was still to come, and could not end; both of shape [N].
        """
        n = len(self._kinds)
        if not self._shared or not issued(self._costs):
            return np.zeros(n), np.zeros(n)
        measured_s = self._pairs.measured_s.tolist()
        of = self._graph, self._costs, self._kinds, measured_s
        run = IssuedRun(*of, None, self._rule.latencies)
        run()
        launched_s = np.array([run.launched_s(at) for at in range(n)])
        held_s = np.array([run.held_s(at) for at in range(n)])
        waits_s = np.maximum(0.0, [launched_s, held_s] - np.array(run.start_s))
        return waits_s[0] * self._launched_last, waits_s[1]

    @cached_property
    def _launched_last(self) -> np.ndarray:
        """Whether a task's work begins only with the last of its launches; [N]."""
        of_step = [t.lane in LAUNCHED_LAST for t in self._graph]
        return np.tile(of_step, len(self._kinds) // len(of_step))

    def _company(self) -> tuple[np.ndarray, np.ndarray]:
        """Each task's mean speed by the prediction's rule, given who ran beside it, and the share
        of its run in which others drew on what it draws on; both of shape [N].
        """
        begin, end = self._spans()
        begin = np.minimum(end, begin + self._waits_s[0])
        together = _Together(self._costs, self._rule)
        draws = [together.draw(kind) for kind in self._kinds]
        progress, disturbed = [0.0] * len(begin), [0.0] * len(begin)
        lasting = np.flatnonzero(end > begin).tolist()
        # At one moment ends come before starts.
        changes = sorted([(begin[i], 1, i) for i in lasting] + [(end[i], 0, i) for i in lasting])
        running: list[int] = []
        since = 0.0
        for now, starts, i in changes:
            if now > since and running:
                speeds, crowded = together.of(tuple(draws[j] for j in running))
                for j, speed, is_crowded in zip(running, speeds, crowded, strict=True):
                    progress[j] += speed * (now - since)
                    disturbed[j] += is_crowded * (now - since)
            since = now
            if starts:
                running.append(i)
            else:
                running.remove(i)
        lasted = end - begin
        ran = lasted > 0
        speeds = np.divide(progress, lasted, out=np.ones(len(begin)), where=ran)
        shares = np.divide(disturbed, lasted, out=np.zeros(len(begin)), where=ran)
        return speeds, shares

    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Measured begin and end of each task, shape [N]; none begins before the one ahead of it
        in its lane ended, which the clocks' noise may have it do.
        """
        timeline, place = self._pairs.measured, np.empty(len(self._pairs.after), dtype=int)
        place[self._pairs.after] = np.arange(len(place))
        begin, end = timeline.start_s[self._pairs.after], timeline.end_s[self._pairs.after]
        for members in timeline.by_lane.values():
            lane = place[members]
            ends = np.maximum.accumulate(end[lane])
            begin[lane[1:]] = np.maximum(begin[lane[1:]], ends[:-1])
            end[lane] = np.maximum(end[lane], begin[lane])
        return begin, end


class _Together:
    """Speeds of tasks that run together, worked out once for each combination."""

    def __init__(self, costs: Sequence[Cost], rule: CostModel) -> None:
        self._costs, self._rule = costs, rule
        self._loads: list[dict[str, float]] = []
        self._keeps: list[Mapping[str, float]] = []
        self._of_kind: dict[int, int] = {}
        self._numbers: dict[tuple[tuple[tuple[str, float], ...], ...], int] = {}
        self._known: dict[tuple[int, ...], tuple[list[float], list[bool]]] = {}

    def draw(self, kind: int) -> int:
        """The number of what a kind of task draws: kinds that draw alike have one."""
        if kind not in self._of_kind:
            cost = self._costs[kind]
            loads = self._rule.loads(cost)
            key = tuple(loads.items()), tuple(cost.keeps.items())
            number = self._numbers.setdefault(key, len(self._loads))
            if number == len(self._loads):
                self._loads.append(loads)
                self._keeps.append(cost.keeps)
            self._of_kind[kind] = number
        return self._of_kind[kind]

    def of(self, draws: tuple[int, ...]) -> tuple[list[float], list[bool]]:
        """Of tasks that draw so: each one's speed, and whether another draws on the same."""
        if draws not in self._known:
            loads, keeps = ([of[draw] for draw in draws] for of in (self._loads, self._keeps))
            users: dict[str, int] = {}
            for load in loads:
                for name in load:
                    users[name] = users.get(name, 0) + 1
            crowded = [
                any(users[name] > 1 for name in load)
                or any(users.get(name, 0) > (name in load) for name in kept)
                for load, kept in zip(loads, keeps, strict=True)
            ]
            self._known[draws] = speeds_of(loads, self._rule, keeps), crowded
        return self._known[draws]


class _Period:
    """The period of a run, as ``Timeline.period_s`` has it."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._step = np.array(steps) - min(steps)
        self.n_steps = int(self._step.max()) + 1

    def of(self, start_s: Sequence[float], end_s: Sequence[float]) -> float:
        ends = np.full(self.n_steps, -np.inf)
        np.maximum.at(ends, self._step, end_s)
        if self.n_steps < 2:
            return float(ends[0] - min(start_s))
        last = max(1, self.n_steps - 2)
        return float(ends[last] - ends[0]) / last
