"""What tasks take within steps that ran: where neither the issuing thread nor another lane holds
them up, that is what a step finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moegen.exec.issue import Times
from moegen.graph.task import Lane, Task, TaskGraph, TaskId, Work

# Fewer say nothing of an op.
LEAST = 2
# Who reads host memory or uses the link while weights are copied, and for how much of a copy that
# is no matter.
_DISTURBS = frozenset({Lane.CPU, Lane.KV})
_UNDISTURBED = 0.02
# A copy, or KV that is fetched, shares the link all the time if nearly all of it does; what is
# shorter begins and ends too soon to tell.
_ALL, _LONG_S = 0.97, 2e-4
# A task is alone, or beside others, if nearly all of it is.
_NEARLY = 0.1
# Attention this fast, of what it can read, is bound by reading.
_FAST = 0.5
# Experts without tokens do nothing, and the others have theirs: not what the graph says.
_MOST_IDLE = 0.1


class Spans(NamedTuple):
    """Seconds of each time that tasks of one kind ran; empty where there are too few.

    Attributes
    ----------
    alone : list of float
        As nothing but their work has it.
    crowded : list of float
        Beside zero-copy kernels, which all others wait for.
    beside_copies : list of float
        Beside copies of weights, of what these slow: what the ACT lane carries.
    """

    alone: list[float]
    crowded: list[float]
    beside_copies: list[float]


class InStep:
    """The tasks of some steps, as they ran on lanes with hardware of their own.

    Parameters
    ----------
    g : TaskGraph
        Of one step.
    times : iterable of Times
        Of steps of it.
    """

    def __init__(self, g: TaskGraph, times: Iterable[Times]) -> None:
        self._g = g
        self._ran: dict[TaskId, list[Times]] = defaultdict(list)
        busy: dict[Lane, list[Times]] = {lane: [] for lane in Lane}
        for t in times:
            task = t.task._replace(step=0)
            self._ran[task].append(t)
            if t.worked:
                busy[g[task].lane].append(t)
        self._busy = {lane: _spans(times) for lane, times in busy.items()}

    def spans(self, tasks: Sequence[Task]) -> Spans:
        """How long tasks of one kind took.

        Copies of weights count if no KV was moved and none read by the CPU meanwhile; kernels and
        other copies if they had been launched before their turn came: of others a part of the
        time is the thread's that launches them. What the CPU takes counts always, with the copies
        beside it; so do prompts' attention and what their new KV makes of it, which goes down at
        the same time. Fetched KV does not count, as it shares the link all the time, nor new KV
        that shares it with what the ACT lane carries, nor experts of whom some had no tokens.
        """
        first = tasks[0]
        ran = [t for task in tasks for t in self._ran[task.id]]
        worked = [t for t in ran if t.worked]
        alone: list[Times] = []
        crowded: list[Times] = []
        copies: list[Times] = []
        if first.lane is Lane.CPU:
            alone = worked
        elif first.lane is Lane.BULK:
            alone = [t for t in worked if self._beside(t, _DISTURBS) <= _UNDISTURBED]
        elif first.id.op != "fetch_kv" and not self._idle(first, ran, worked):
            launched = [t for t in worked if not t.late]
            if first.id.op == "attn_prefill":
                alone = launched
            elif first.lane is Lane.KV:
                alone, _ = self._apart(launched, Lane.ACT)
            else:
                alone, crowded = self._apart(launched, Lane.KV)
            if first.lane is Lane.ACT:
                alone, copies = self._apart(alone, Lane.BULK)
        return Spans(_seconds(alone), _seconds(crowded), _seconds(copies))

    def slowed_copies(self, attends_bytes_per_s: float) -> tuple[float, float]:
        """What copies of weights lost beside the CPU's attention, and for how long they were beside
        it.

        Attention counts that reads host memory at half of its rate or faster: what binds the rest
        is something else. Copies that KV crossed beside do not count, nor sizes of which none was
        undisturbed.

        Parameters
        ----------
        attends_bytes_per_s : float
            What the CPU's attention reads of host memory where nothing else binds it.
        """
        reads: list[Times] = []
        copies: dict[Work, list[Times]] = defaultdict(list)
        for task in self._g:
            if task.work is None:
                continue
            ran = [t for t in self._ran[task.id] if t.worked]
            if task.lane is Lane.BULK:
                copies[task.work] += ran
            elif task.lane is Lane.CPU:
                most_s = task.work.host_bytes / (_FAST * attends_bytes_per_s)
                reads += [t for t in ran if _took(t) <= most_s]
        reading = _spans(reads)
        lost_s = beside_s = 0.0
        for times in copies.values():
            apart = [t for t in times if self._beside(t, {Lane.KV}) <= _UNDISTURBED]
            alone = [_took(t) for t in apart if self._beside(t, {Lane.CPU}) <= _UNDISTURBED]
            if len(alone) < LEAST:
                continue
            for t in apart:
                both_s = _overlap_s(t, reading)
                others = self._beside(t, {Lane.CPU}) - both_s / _took(t)
                if both_s > 0 and others <= _UNDISTURBED:
                    beside_s += both_s
                    lost_s += _took(t) - float(np.median(alone))
        return lost_s, beside_s

    def shared_link(self) -> np.ndarray:
        """Bytes and seconds of copies of weights by themselves, of copies beside KV that was being
        fetched, and of KV fetched beside copies, all without CPU attention; shape [3, 2].

        KV that was fetched before the thread was through with launching it does not count.
        """
        moved = np.zeros((3, 2))
        fetches = [task for task in self._g if task.id.op == "fetch_kv"]
        fetched = _spans(t for task in fetches for t in self._ran[task.id] if t.worked)
        for task in self._g:
            is_fetch = task.id.op == "fetch_kv"
            if task.work is None or not (is_fetch or task.lane is Lane.BULK):
                continue
            for t in self._ran[task.id]:
                took_s = _took(t)
                if took_s < _LONG_S or self._beside(t, {Lane.CPU}) > _UNDISTURBED:
                    continue
                if is_fetch and not t.late and self._beside(t, {Lane.BULK}) >= _ALL:
                    moved[2] += task.work.h2d_bytes, took_s
                elif not is_fetch and _overlap_s(t, fetched) >= _ALL * took_s:
                    moved[1] += task.work.h2d_bytes, took_s
                elif not is_fetch and self._beside(t, {Lane.KV, Lane.ACT}) <= _UNDISTURBED:
                    moved[0] += task.work.h2d_bytes, took_s
        return moved

    def _apart(self, times: Sequence[Times], lane: Lane) -> tuple[list[Times], list[Times]]:
        """Those that were nearly alone, and those nearly all the time beside a lane at work."""
        beside = [self._beside(t, {lane}) for t in times]
        alone = [t for t, x in zip(times, beside, strict=True) if x <= _NEARLY]
        return alone, [t for t, x in zip(times, beside, strict=True) if x >= 1 - _NEARLY]

    @staticmethod
    def _idle(first: Task, ran: Sequence[Times], worked: Sequence[Times]) -> bool:
        return first.id.op == "expert" and len(worked) < (1 - _MOST_IDLE) * len(ran)

    def _beside(self, t: Times, lanes: Collection[Lane]) -> float:
        """For what part of a task these lanes were at work; two at once count twice."""
        beside_s = sum(_overlap_s(t, self._busy[lane]) for lane in lanes)
        return beside_s / _took(t)


def _spans(times: Iterable[Times]) -> np.ndarray:
    """From when and until when tasks ran, shape [2, tasks]."""
    return np.array([(t.start_s, t.end_s) for t in times]).reshape(-1, 2).T


def _overlap_s(t: Times, spans: np.ndarray) -> float:
    """For how long these spans, shape [2, n], are beside a task."""
    start, end = spans
    both = np.minimum(end, t.end_s) - np.maximum(start, t.start_s)
    return float(both.clip(min=0).sum())


def _took(t: Times) -> float:
    return t.end_s - t.start_s


def _seconds(times: Sequence[Times]) -> list[float]:
    return [_took(t) for t in times] if len(times) >= LEAST else []
