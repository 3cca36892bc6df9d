"""What tasks take within steps that ran: where neither the issuing thread nor another lane holds
them up, that is what a step finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from moegen.exec.issue import Times
from moegen.graph.task import Lane, Task, TaskGraph, TaskId

# Fewer say nothing of an op.
LEAST = 2
# Who reads host memory or uses the link while weights are copied, and for how much of a copy that
# is no matter.
_DISTURBS = (Lane.CPU, Lane.KV)
_UNDISTURBED = 0.02
# Experts without tokens do nothing, and the others have theirs: not what the graph says.
_MOST_IDLE = 0.1


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
        self._graph = g
        self._ran: dict[TaskId, list[Times]] = defaultdict(list)
        self._disturbed: list[tuple[float, float]] = []  # by whom, from when, until when
        for t in times:
            task = t.task._replace(step=0)
            self._ran[task].append(t)
            if g[task].lane in _DISTURBS and t.end_s > t.start_s:
                self._disturbed.append((t.start_s, t.end_s))

    def spans(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of each time that tasks of one kind ran as nothing but their work has it.

        Copies of weights count if no KV was moved and none read by the CPU meanwhile; kernels and
        other copies if they had been launched before their turn came: of others a part of the
        time is the thread's that launches them. Fetched KV shares the link all the time, and what
        the CPU takes depends on the copies beside it: none of these count, nor experts of whom
        some had no tokens.

        Returns
        -------
        list of float
            Empty if there are fewer than `LEAST`.
        """
        first = tasks[0]
        if first.lane is Lane.CPU or first.id.op == "fetch_kv":
            return []
        ran = [t for task in tasks for t in self._ran[task.id]]
        worked = [t for t in ran if t.end_s > t.start_s]
        if first.id.op == "expert" and len(worked) < (1 - _MOST_IDLE) * len(ran):
            return []
        if first.lane is Lane.BULK:
            kept = [t for t in worked if not self._is_disturbed(t)]
        else:
            kept = [t for t in worked if t.start_s >= t.issued_s]
        return [t.end_s - t.start_s for t in kept] if len(kept) >= LEAST else []

    def _is_disturbed(self, t: Times) -> bool:
        if not self._disturbed:
            return False
        start, end = np.array(self._disturbed).T
        beside = np.minimum(end, t.end_s) - np.maximum(start, t.start_s)
        return bool(beside.clip(min=0).sum() > _UNDISTURBED * (t.end_s - t.start_s))
