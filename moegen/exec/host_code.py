"""What handing tasks over takes of the issuing thread where it has not rested, as all steps that
ran tell it together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from moegen.exec.in_step import LEAST
from moegen.exec.issue import Times
from moegen.exec.rests import how_cold
from moegen.graph.features import FEATURES, FEATURES_OF
from moegen.graph.latencies import BINDS, Latencies
from moegen.graph.task import Lane, Task, TaskGraph, TaskId

# Fewer kinds of tasks say nothing.
_LEAST_KINDS = 3
# Beyond so much the thread is far ahead; the share of tasks that surely did not wait for room.
_FAR_AHEAD_S, _UNBLOCKED = 0.02, 0.1
# So many times the median is more than any state of the thread's makes of it.
_HELD_UP = 3.0


class Handed(NamedTuple):
    """What tasks of one kind took of the issuing thread, in the mean of a run.

    Attributes
    ----------
    task : Task
        One of them, with its work.
    issue_s : float
        To hand it over, of a warm thread.
    turn_s : float
        Before that, likewise, once it could: putting waits before it, binding its step.
    times : int
        How many both are the mean of.
    late : bool
        Whether these are those that their lane waited for; never of copies of weights, of which
        the quickest tells.
    """

    task: Task
    issue_s: float
    turn_s: float
    times: int
    late: bool


class _Host(NamedTuple):
    """What a task took of a warm thread, and as it ran."""

    issue_s: float
    turn_s: float
    times: Times


def handed_over(g: TaskGraph, times: Iterable[Times], latencies: Latencies) -> Iterator[Handed]:
    """Each kind of a graph's tasks, from steps of it.

    What rests cost the thread is taken off first. In decode those tell that their lane waited for,
    if there are some: these make a step longer. But of experts and of micro-batches all count, for
    the thread is far ahead of some and just behind others of the same work. Of waves those that
    soon began, for where the thread is far ahead it waits for room in the driver's queues, which
    is no work of its own; a low quantile if there are none, and of copies of weights.

    Parameters
    ----------
    g : TaskGraph
        Of one step, with a shape.
    times : iterable of Times
    latencies : Latencies
        What rests cost the thread, which is taken off.
    """
    ran: dict[TaskId, list[_Host]] = defaultdict(list)
    for t, cold, _ in how_cold(times):
        if t.worked:
            issue_s = (t.issued_s - t.issue_s) / (1 + latencies.rested_issue * cold)
            turn_s = (t.issue_s - t.turned_s) / (1 + latencies.rested_turn * cold)
            ran[t.task._replace(step=0)].append(_Host(issue_s, turn_s, t))
    kinds: dict[object, list[Task]] = defaultdict(list)
    for task in g:
        if task.work is not None and not task.work.empty:
            kinds[task.id.op, task.work].append(task)
    for tasks in kinds.values():
        if of := [t for task in tasks for t in ran[task.id]]:
            yield _handed(tasks[0], of)


def _handed(task: Task, ran: list[_Host]) -> Handed:
    one_of_several = task.id.expert >= 0 or task.id.microbatch >= 0
    told_by_late = task.id.phase == "decode" and not one_of_several
    of, late = _usual, [x for x in ran if x.times.late and told_by_late]
    if task.id.phase == "prefill":
        soon = [x for x in ran if x.times.start_s - x.times.issue_s < _FAR_AHEAD_S]
        ran, of = (soon, _usual) if soon else (ran, _unblocked)
    elif len(late) >= LEAST:
        ran = late
    if task.lane is Lane.BULK:
        of, late = _unblocked, []
    issue_s, turn_s = of([x.issue_s for x in ran]), of([x.turn_s for x in ran])
    return Handed(task, issue_s, turn_s, len(ran), len(late) >= LEAST)


def _usual(host_s: Sequence[float]) -> float:
    """The mean, which is what steps are made of; without what another process held up."""
    most_s = _HELD_UP * float(np.median(host_s))
    return float(np.mean([s for s in host_s if s <= most_s]))


def _unblocked(host_s: Sequence[float]) -> float:
    return float(np.quantile(host_s, _UNBLOCKED))


class HostCode:
    """What an op takes of the issuing thread.

    It is the same work whatever a kernel works on, and takes a third more or less from run to run:
    so all that ran tell it together, but for what comes with binding a step, which takes no less
    the more rows it has. A copy of weights that waits for room in the driver's queue takes longer,
    so of these the quickest tells it. Waves have the more micro-batches the larger they are, and
    most are those of large ones: each counts.

    Parameters
    ----------
    op : str
    handed : sequence of Handed
        All that is known of it; may be none.

    Attributes
    ----------
    more_s : float or None
        What each kernel of a task beyond the first takes; None if nothing tells, and each takes as
        long as that.
    """

    def __init__(self, op: str, handed: Sequence[Handed]) -> None:
        late = [h for h in handed if h.late]
        if len(late) >= _LEAST_KINDS:
            handed = late
        self.more_s: float | None = None
        self._of_one_s = self._turn_s = 0.0
        self._of_all = "launches" in FEATURES_OF[op]
        self._sizes: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if not handed:
            return
        size = FEATURES[FEATURES_OF[op][0]]
        rows = [
            (size.of(h.task.work), h.issue_s, h.turn_s, h.task.work.launches, _weight(h))
            for h in handed
            if h.task.work is not None
        ]
        sizes, issue_s, turn_s, kernels, weights = np.array(sorted(rows), float).T
        if op in BINDS:
            self._sizes = sizes, isotonic_regression(issue_s).x, isotonic_regression(turn_s).x
            return
        self._turn_s = _median(turn_s, weights)
        one, several = kernels == 1, kernels > 1
        if handed[0].task.lane is Lane.BULK:
            self._of_one_s = float((issue_s / kernels)[one if one.any() else several].min())
        elif not one.any() or not several.any():
            self._of_one_s = _median(issue_s / kernels, weights)
        else:
            self._of_one_s = _median(issue_s[one], weights[one])
            further_s = (issue_s[several] - self._of_one_s) / (kernels[several] - 1)
            self.more_s = max(0.0, _median(further_s, weights[several]))

    def issue_s(self, size: float, kernels: float) -> float:
        """Of a task of ``size``, its first feature: of one kernel, or of all where an op's seconds
        are those of all."""
        if self._sizes is not None:
            return float(np.interp(size, self._sizes[0], self._sizes[1]))
        further = kernels - 1 if self._of_all else 0
        return self._of_one_s + further * (self._of_one_s if self.more_s is None else self.more_s)

    def turn_s(self, size: float) -> float:
        """Of a task of ``size``."""
        if self._sizes is not None:
            return float(np.interp(size, self._sizes[0], self._sizes[2]))
        return self._turn_s


def _weight(h: Handed) -> int:
    return h.times if h.task.id.phase == "prefill" else 1


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    return float(np.median(np.repeat(values, weights.astype(int))))
