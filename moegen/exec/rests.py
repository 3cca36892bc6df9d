"""What a rest costs the issuing thread, from the times of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from moegen.exec.issue import Times
from moegen.graph.latencies import BINDS, FELT_S, Rest
from moegen.graph.ops import OPS
from moegen.graph.task import Lane, TaskGraph

#: A graph, and the tasks of steps of it.
Steps = tuple[TaskGraph, Sequence[Times]]
#: More is not tried, of how many times longer a task takes for each unit of cold.
MOST_TRIED = 4.0
_TRIALS = np.linspace(0.0, MOST_TRIED, 81)
# Fewer tasks of a kind say nothing, nor do those that are all about as cold.
_LEAST, _APART = 4, 0.5


class Found(NamedTuple):
    """A task, how cold the thread's code was (see `Rest`), and for how long it had rested just
    before."""

    times: Times
    cold: float
    rest_s: float


def how_cold(times: Iterable[Times]) -> Iterator[Found]:
    """Each task of some steps of a run, in the order in which the thread turned to them.

    Copies of weights for the first of these steps are handed over while the step before has tasks
    of its own, which are not there: until another task has come, nothing tells of a rest.
    """
    rest, free_s = Rest(), np.inf
    for t in sorted(times, key=attrgetter("turned_s")):
        rest_s = max(0.0, t.turned_s - free_s)
        yield Found(t, rest.before(rest_s, t.task.op), rest_s)
        rest.handed_over()
        if free_s < np.inf or OPS[t.task.op].lane is not Lane.BULK:
            free_s = t.issued_s


def costs_of_rests(models: Iterable[Iterable[Steps]]) -> tuple[float, float]:
    """What `moegen.graph.latencies.Latencies` calls ``rested_issue`` and ``rested_turn``.

    Each is the trial value with which the first tasks after rests take the same of a warm thread
    as all tasks of their op, of as many kernels each: in the mean of the logarithm's distance from
    the median of all; each model counts once. Copies of weights do not count, which wait for room
    in the driver's queue, nor what binding a step makes slow, nor ops whose tasks are all about as
    cold, of which no two can be compared.

    Parameters
    ----------
    models : iterable of iterable of Steps
        Steps of decode; others are left out.

    Returns
    -------
    tuple of float
        0 where nothing tells; `MOST_TRIED` may be less than it is.
    """
    found = [_by_kind(steps) for steps in models]
    found = [kinds for kinds in found if kinds]
    return _cost(found, _issue_s), _cost(found, _turn_s)


def _by_kind(steps: Iterable[Steps]) -> list[list[Found]]:
    """By op and number of kernels, what often enough comes after a rest, and as often without or
    after a much shorter one."""
    kinds: dict[tuple[str, int], list[Found]] = defaultdict(list)
    for g, times in steps:
        if g.phase != "decode":
            continue
        for of in how_cold(times):
            task = g[of.times.task._replace(step=0)]
            counts = task.lane is not Lane.BULK and task.id.op not in BINDS
            if counts and of.times.worked and task.work is not None:
                kinds[task.id.op, task.work.launches].append(of)
    return [of for of in kinds.values() if _tells(of)]


def _tells(of: Sequence[Found]) -> bool:
    rested = [x.cold for x in of if x.rest_s >= FELT_S]
    if len(rested) < _LEAST:
        return False
    return float(np.median(rested)) - sorted(x.cold for x in of)[_LEAST - 1] >= _APART


def _cost(models: Sequence[Sequence[Sequence[Found]]], seconds: Callable[[Times], float]) -> float:
    if not models:
        return 0.0
    error = np.zeros(len(_TRIALS))
    for kinds in models:
        apart = []
        for of in kinds:
            logs = np.log([max(seconds(x.times), 1e-9) for x in of])
            warm = logs - np.log1p(np.outer(_TRIALS, [x.cold for x in of]))
            distance = np.abs(warm - np.median(warm, axis=1, keepdims=True))
            apart.append(distance[:, [x.rest_s >= FELT_S for x in of]])
        error += np.concatenate(apart, axis=1).mean(axis=1)
    return round(float(_TRIALS[error.argmin()]), 2)


def _issue_s(t: Times) -> float:
    return t.issued_s - t.issue_s


def _turn_s(t: Times) -> float:
    return t.issue_s - t.turned_s
