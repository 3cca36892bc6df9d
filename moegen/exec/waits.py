"""How long it takes to notice an end, from the times of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from moegen.exec.issue import Times
from moegen.graph.latencies import Latencies

# From which op's end to which op: to when the issuing thread turns to it, or to when it starts.
_PAIRS = {
    "gpu_to_host_s": ("copy_counts", "expert", "turned_s"),
    "cpu_to_host_s": ("attn_cpu", "recv_attn", "turned_s"),
    "gpu_to_cpu_s": ("send_qkv", "attn_cpu", "start_s"),
}


def latencies(records: Iterable[Sequence[Times]]) -> Latencies:
    """The median of each, over runs; 0 where nothing tells.

    Parameters
    ----------
    records : iterable of sequence of Times
        Of runs of decode steps.
    """
    taken: dict[str, list[float]] = {name: [] for name in _PAIRS}
    for times in records:
        for name, (before, after, what) in _PAIRS.items():
            ends = {_place(t): t.end_s for t in times if t.task.op == before}
            firsts: dict[tuple[int, int], Times] = {}
            for t in times:
                if t.task.op == after:
                    at = _place(t)
                    firsts[at] = min(t, firsts.get(at, t), key=attrgetter(what))
            for at in firsts.keys() & ends.keys():
                noticed_s, from_s = getattr(firsts[at], what), ends[at]
                if what == "start_s":  # a lane that has not got the task yet cannot be woken
                    from_s = max(from_s, firsts[at].issue_s)
                taken[name].append(max(0.0, noticed_s - from_s))
    return Latencies(**{k: float(np.median(v)) if v else 0.0 for k, v in taken.items()})


def _place(t: Times) -> tuple[int, int]:
    return t.task.step, t.task.layer
