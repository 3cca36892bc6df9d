"""Cost models corrected by a measured run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.task import Lane, Task
from moegen.sim.cost import CostModel, checked_cost
from moegen.sim.rerun import measured_run, places, rerun
from moegen.sim.same_machine import check_machine
from moegen.sim.scaled import Scaled
from moegen.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

# Where tasks share much, one correction moves others: it is made again until nothing moves.
TOLERANCE, MOST_ROUNDS = 1e-6, 12
# An op whose tasks do not follow its factor by so much is held up by something else, such as the
# thread that hands tasks over: it keeps its first factor.
FOLLOWS = 0.25
# The worst error of a step that a prediction is held to (benchmarks/h200/prediction). A step is
# about as wrong as the time of its lanes: a run that was corrected and is further off than that
# is no better than one that was never measured.
FAR = 0.06
# So many ops are named, those that miss most of a step first.
_NAMED = 3

#: What is corrected together: an op of a phase on its lane.
Key = tuple[str, str, Lane]


class Corrected(Scaled):
    """A cost model whose durations are, in the mean, those of a run. Made by :func:`correct`.

    Ops that the run did not have, and those of another phase, stay as they were.

    Attributes
    ----------
    factors : mapping
        By op, phase and lane: what the other model's durations are multiplied by.
    doubt : str
        Which ops no factor brought near to what the run had, where they take a lane's time off by
        more than 6% of a step; empty where the correction holds.
    """

    def __init__(self, cost: CostModel, factors: Mapping[Key, float], doubt: str = "") -> None:
        super().__init__(cost)
        self.factors, self.doubt = dict(factors), doubt

    def __repr__(self) -> str:
        return f"{self.of!r} corrected by a run"

    def physical(self) -> CostModel:
        return Corrected(self.of.physical(), self.factors, self.doubt)

    def factor(self, task: Task) -> float:
        return self.factors.get((task.id.op, task.id.phase, task.lane), 1.0)

    def to_frame(self) -> pd.DataFrame:
        """One row an op: ``phase``, ``lane`` and ``factor``, the farthest from 1 first."""
        import pandas as pd

        rows = [(op, phase, lane.value, f) for (op, phase, lane), f in self.factors.items()]
        frame = pd.DataFrame(rows, columns=["op", "phase", "lane", "factor"]).set_index("op")
        return frame.sort_values("factor", key=lambda f: -(f - 1).abs(), kind="stable")


def correct(cost: CostModel, measured: Timeline) -> Corrected:
    """``cost`` with a factor for each op, so that a run's durations come out in the mean.

    The run is simulated as it was, each step with its own shape, all resources shared. The
    factor of an op is what its tasks took together over what they take there, so that what the
    run's tasks lost to each other is in both. Where that changes who meets whom, it is done
    again until durations stay.

    Parameters
    ----------
    cost : CostModel
    measured : Timeline
        Steps that count are those of ``Timeline.counted_steps``.

    Raises
    ------
    InvalidInput
        If the timeline was not measured, or an op that has something to do takes no time by
        ``cost`` and some in the run: no factor corrects that.

    Warns
    -----
    UserWarning
        If ops still miss what the run had by much, as ``Corrected.doubt`` has it.
    """
    measured = measured_run(measured)
    check_machine(checked_cost(cost), measured)
    of_run = measured.graph, measured.shapes, len(measured.steps)
    corrected = Corrected(cost, {})
    run = rerun(*of_run, corrected)
    mine, theirs = places(measured, run)
    keys: dict[Key, int] = {}
    tasks = [measured.tasks[i] for i in mine]
    of = np.array([keys.setdefault(_key(t), len(keys)) for t in tasks], dtype=int)
    took = np.bincount(of, (measured.end_s - measured.start_s)[mine], len(keys))
    works = np.bincount(of, [_works(run.tasks[i]) for i in theirs], len(keys)) > 0
    factors, asked = np.ones(len(keys)), np.zeros(len(keys))
    first, before = factors, np.zeros(len(keys))
    free = np.ones(len(keys), dtype=bool)
    for k in range(MOST_ROUNDS):
        takes = np.bincount(of, (run.end_s - run.start_s)[theirs], len(keys))
        _refuse_nothing(list(keys), took, np.where(works, takes, took), factors)
        ratio = np.divide(took, takes, out=np.ones(len(keys)), where=takes > 0)
        if k:
            came = np.divide(takes, before, out=np.ones(len(keys)), where=before > 0) - 1
            free &= ~(np.abs(came) < FOLLOWS * np.abs(asked - 1)) | (np.abs(ratio - 1) < TOLERANCE)
        wrong = np.abs(ratio - 1)[free]
        if wrong.max(initial=0.0) <= TOLERANCE:
            break
        factors = np.where(free, factors * ratio, first)
        first = first if k else factors
        before, asked = takes, ratio
        corrected = Corrected(cost, dict(zip(keys, factors.tolist(), strict=True)))
        run = rerun(*of_run, corrected)
    takes = np.bincount(of, (run.end_s - run.start_s)[theirs], len(keys))
    corrected.doubt = _doubt(list(keys), took, takes, measured)
    if corrected.doubt:
        warnings.warn(
            f"the cost model cannot be corrected by this run: {corrected.doubt}. What follows from "
            f"it is not to be trusted",
            stacklevel=3,
        )
    return corrected


def _doubt(keys: list[Key], took: np.ndarray, takes: np.ndarray, measured: Timeline) -> str:
    """Which ops miss what they took, in words, if a lane's time is far off for them."""
    all_s = measured.period_s * len(measured.counted_steps)
    if not all_s > 0:
        return ""
    missed = (takes - took) / all_s
    lanes = np.array([lane.value for _, _, lane in keys])
    far = [lane for lane in np.unique(lanes) if abs(missed[lanes == lane].sum()) > FAR]
    on_far = np.flatnonzero(np.isin(lanes, far))
    worst = on_far[np.argsort(-np.abs(missed[on_far]), kind="stable")][:_NAMED]
    named = [
        f"{keys[i][0]} {takes[i] / took[i] - 1:+.0%}" if took[i] else keys[i][0] for i in worst
    ]
    if not far:
        return ""
    off = max((missed[lanes == lane].sum() for lane in far), key=abs)
    return (
        f"replayed, {', '.join(named)} against what was measured, so that a lane is off by "
        f"{abs(off):.0%} of a step"
    )


def _key(task: Task) -> Key:
    return task.id.op, task.id.phase, task.lane


def _works(task: Task) -> bool:
    """Whether it has something to do: what has not may take a moment, which asks for no factor."""
    return task.work is None or not task.work.empty


def _refuse_nothing(
    keys: list[Key], took: np.ndarray, takes: np.ndarray, factors: np.ndarray
) -> None:
    for i in np.flatnonzero((takes == 0) & (took > 0) & (factors > 0))[:1]:
        raise InvalidInput(
            f"{keys[i][0]} takes no time by the cost model, and {took[i]:.3g} s in the measured "
            f"run: no factor corrects that. Give it a duration in the cost model"
        )
