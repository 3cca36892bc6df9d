"""What the steps of a profile tell beside the times of single ops: of the issuing thread, and of
copies of weights beside the CPU's attention."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from moegen.exec.host_code import Handed
from moegen.exec.issue import Times
from moegen.exec.op_bench import OpBench
from moegen.graph.company import Company

# Less of it says little of how much slower copies are.
_LEAST_S = 0.03
# Nothing stands still.
_LEAST_SHARE = 0.01
_SLOWED = ("h2d", "host_memory")


@dataclass
class Told:
    """Of one model's points.

    Attributes
    ----------
    records : list of sequence of Times
        Of the steps that count, by point.
    handed : list of Handed
    lost_s, beside_s : float
        See `moegen.exec.in_step.InStep.slowed_copies`.
    """

    records: list[Sequence[Times]] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)
    lost_s: float = 0.0
    beside_s: float = 0.0

    def add(self, ops: OpBench, tells: Collection[str], attends_bytes_per_s: float) -> None:
        """What the steps of a point tell; of the issuing thread for some ops alone."""
        self.records.append(ops.records)
        self.handed += [h for h in ops.handed_over() if h.task.id.op in tells]
        lost_s, beside_s = ops.slowed_copies(attends_bytes_per_s)
        self.lost_s += lost_s
        self.beside_s += beside_s


def as_in_steps(company: Sequence[Company], told: Iterable[Told]) -> list[Company]:
    """``company``, where steps tell how much copies of weights keep beside the CPU's attention."""
    told = list(told)
    beside_s = sum(t.beside_s for t in told)
    if beside_s < _LEAST_S:
        return list(company)
    share = min(1.0, max(_LEAST_SHARE, 1 - sum(t.lost_s for t in told) / beside_s))
    how = "measured: copies of weights beside CPU attention, within steps"
    return [
        replace(entry, share=share, source=how)
        if (entry.resource, entry.beside) == _SLOWED
        else entry
        for entry in company
    ]
