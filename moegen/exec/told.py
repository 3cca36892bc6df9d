"""What the steps of a profile tell beside the times of single ops: of the issuing thread, and of
copies of weights beside the CPU's attention and beside KV that is fetched."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moegen.exec.host_code import Handed, handed_over
from moegen.exec.op_bench import OpBench
from moegen.exec.rests import Steps, costs_of_rests
from moegen.exec.waits import latencies
from moegen.graph.company import Company
from moegen.graph.latencies import Latencies

# Less of it says little of how much slower copies are.
_LEAST_S = 0.03
# Nothing stands still.
_LEAST_SHARE = 0.01
_SLOWED, _SHARED = ("h2d", "host_memory"), ("h2d", "zero_copy")


@dataclass
class Told:
    """Of one model's points.

    Parameters
    ----------
    attends_bytes_per_s : float
        What the CPU's attention reads of host memory where nothing else binds it.

    Attributes
    ----------
    steps : list of Steps
        Those that count, by point.
    tells : list of collection of str
        Ops of which each point tells what handing them over takes.
    lost_s, beside_s : float
        See `moegen.exec.in_step.InStep.slowed_copies`.
    link : ndarray, shape [3, 2]
        See `moegen.exec.in_step.InStep.shared_link`.
    """

    attends_bytes_per_s: float
    steps: list[Steps] = field(default_factory=list)
    tells: list[Collection[str]] = field(default_factory=list)
    lost_s: float = 0.0
    beside_s: float = 0.0
    link: np.ndarray = field(default_factory=lambda: np.zeros((3, 2)))

    def add(self, ops: OpBench, tells: Collection[str]) -> None:
        """What the steps of a point tell; of the issuing thread for some ops alone."""
        self.steps.append((ops.graph, ops.records))
        self.tells.append(tells)
        lost_s, beside_s = ops.slowed_copies(self.attends_bytes_per_s)
        self.lost_s += lost_s
        self.beside_s += beside_s
        self.link += ops.shared_link()

    def handed_over(self, of: Latencies) -> list[Handed]:
        """What each kind of task took of the issuing thread, without what rests cost it."""
        return [
            handed
            for (g, times), tells in zip(self.steps, self.tells, strict=True)
            for handed in handed_over(g, times, of)
            if handed.task.id.op in tells
        ]


def latencies_of(told: Sequence[Told], *, on_gpu: bool) -> Latencies:
    """What steps tell of waits; and of rests, where the thread has a core for itself."""
    found = latencies([times for of in told for _, times in of.steps], on_gpu=on_gpu)
    if not on_gpu:
        return found
    issue, turn = costs_of_rests(of.steps for of in told)
    return replace(found, rested_issue=issue, rested_turn=turn)


def as_in_steps(company: Sequence[Company], told: Iterable[Told]) -> list[Company]:
    """``company``, where steps tell what copies of weights keep beside the CPU's attention, and
    what they and KV that is fetched move together."""
    told = list(told)
    within = {
        _SLOWED: (_slowed_share(told), "copies of weights beside CPU attention"),
        _SHARED: (_shared_share(told), "copy engine and gather together, against copies alone"),
    }
    found = []
    for entry in company:
        share, how = within.get((entry.resource, entry.beside), (None, ""))
        if share is not None:
            share = min(1.0, max(_LEAST_SHARE, share))
            entry = replace(entry, share=share, source=f"measured: {how}, within steps")
        found.append(entry)
    return found


def _slowed_share(told: Sequence[Told]) -> float | None:
    """None where too little tells, here and below."""
    beside_s = sum(t.beside_s for t in told)
    return 1 - sum(t.lost_s for t in told) / beside_s if beside_s >= _LEAST_S else None


def _shared_share(told: Sequence[Told]) -> float | None:
    nbytes, seconds = sum((t.link for t in told), np.zeros((3, 2))).T
    if (seconds < _LEAST_S).any():
        return None
    alone, copied, fetched = nbytes / seconds
    return float((copied + fetched) / alone)
