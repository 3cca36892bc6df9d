"""What passes between the issuing thread and who works for it, from the times of a run."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from moegen.exec.issue import Times
from moegen.graph.latencies import Latencies
from moegen.graph.ops import OPS
from moegen.graph.task import Lane

# From which op's end to which op: to when the issuing thread turns to it, or to when it starts.
_PAIRS = {
    "gpu_to_host_s": ("copy_counts", "expert", "turned_s"),
    "cpu_to_host_s": ("attn_cpu", "recv_attn", "turned_s"),
    "gpu_to_cpu_s": ("send_qkv", "attn_cpu", "start_s"),
}
# What waits for the task before it on its lane, and else for what has usually ended long before.
_FOLLOWS = frozenset({"attn_prefill", "route", "combine", "sample"})
# Whose kernels are what tells how long launches are under way: small ones.
_LAUNCHED = frozenset({Lane.GPU, Lane.ACT})


def latencies(records: Iterable[Sequence[Times]], *, on_gpu: bool) -> Latencies:
    """The median of each, over runs; 0 where nothing tells.

    Parameters
    ----------
    records : iterable of sequence of Times
        Of runs of steps.
    on_gpu : bool
        Whether lanes are streams of a GPU, which can wait for launches.
    """
    taken: dict[str, list[float]] = {name: [] for name in _PAIRS}
    begins: dict[str, list[float]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    between: dict[str, list[float]] = defaultdict(list)
    for times in records:
        for name in _PAIRS:
            taken[name] += _noticed(times, name)
        for t in _late(times) if on_gpu else ():
            begins[t.task.op].append(t.start_s - t.issue_s)
            if OPS[t.task.op].lane is Lane.GPU:
                ends[t.task.op].append(t.end_s - t.issued_s)
        for before, t in _followed(times) if on_gpu else ():
            between[t.task.op].append(t.start_s - before.end_s)
    return Latencies(
        **{name: _median(each) for name, each in taken.items()},
        # Each op counts once: most tasks are experts.
        issue_to_start_s=max(0.0, _median([_median(each) for each in begins.values()])),
        issued_to_end_s=max(0.0, _median([_median(each) for each in ends.values()])),
        gpu_to_gpu_s=max(0.0, _median([_median(each) for each in between.values()])),
    )


def _noticed(times: Sequence[Times], name: str) -> list[float]:
    """How late, layer by layer, an end was noticed."""
    before, after, what = _PAIRS[name]
    ends = {_place(t): t.end_s for t in times if t.task.op == before}
    firsts: dict[tuple[int, int], Times] = {}
    for t in times:
        if t.task.op == after:
            at = _place(t)
            firsts[at] = min(t, firsts.get(at, t), key=attrgetter(what))
    found = []
    for at in firsts.keys() & ends.keys():
        noticed_s, from_s = getattr(firsts[at], what), ends[at]
        if what == "start_s":  # a lane that has not got the task yet cannot be woken
            from_s = max(from_s, firsts[at].issue_s)
        found.append(max(0.0, noticed_s - from_s))
    return found


def _late(times: Sequence[Times]) -> list[Times]:
    """Tasks that a GPU waited for: it began them before the thread was through."""
    return [t for t in times if OPS[t.task.op].lane in _LAUNCHED and t.late and t.worked]


def _followed(times: Sequence[Times]) -> Iterator[tuple[Times, Times]]:
    """Tasks of the GPU's lane that had been launched when the one before them ended, behind it."""
    worked = (t for t in times if OPS[t.task.op].lane is Lane.GPU and t.worked)
    lane = sorted(worked, key=attrgetter("start_s"))
    for before, t in itertools.pairwise(lane):
        if t.task.op in _FOLLOWS and t.issued_s < before.end_s:
            yield before, t


def _median(each: Sequence[float]) -> float:
    return float(np.median(each)) if each else 0.0


def _place(t: Times) -> tuple[int, int]:
    return t.task.step, t.task.layer
