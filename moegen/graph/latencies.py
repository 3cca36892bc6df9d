"""What passes between the issuing thread and who works for it, and what a rest costs the thread."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from moegen.graph.checks import number

#: More than any takes: a run would seem to stand still.
MOST_S = 60.0
#: More than any rest costs.
MOST_COLD = 100.0
#: Ops of a step's first tasks: what these take of the thread goes by rows, rested or not, for
#: binding the step comes before.
BINDS = frozenset({"copy_rows", "embed"})
#: A rest of less is none: so long the thread may look from lane to lane between two tasks.
FELT_S = 3e-4
# A rest of so long is short, and what is left of one after each task that is handed over; both as
# two models' steps show it on an H200.
_SHORT_S, _FADES = 1e-3, 1 / 3


@dataclass(frozen=True)
class Latencies:
    """Seconds from the end of a task to what waits for it; and from the issuing thread to a GPU
    that waits for what it launches; and what a rest costs the thread.

    Parameters
    ----------
    gpu_to_host_s : float
        From a GPU's task to the issuing thread, which asks now and then.
    cpu_to_host_s : float
        From a task of the CPU lane to the issuing thread, which is woken.
    gpu_to_cpu_s : float
        From a GPU's task to the start of one of the CPU lane.
    issue_to_start_s : float
        From when the thread begins to hand a task over to when a GPU begins it. About as long
        passes from its last launch to when the thread is through: most of both is an event.
    issued_to_end_s : float
        From when the thread is through with a task to its end at the earliest, on a GPU that
        waited for its launches; measured of tasks of several kernels.
    gpu_to_gpu_s : float
        From a GPU's task to the start of one that its stream waits with for it, both launched
        before: what recording and waiting for events takes. Not of copies of weights.
    rested_issue, rested_turn : float
        By how much longer than a warm thread one takes to hand a task over, and for what it does
        before that, for each unit of `Rest.cold`: a resting thread's code is driven out of the
        caches.

    Raises
    ------
    InvalidInput
        If one is negative, seconds are above `MOST_S` or the others above `MOST_COLD`.
    """

    gpu_to_host_s: float = 0.0
    cpu_to_host_s: float = 0.0
    gpu_to_cpu_s: float = 0.0
    issue_to_start_s: float = 0.0
    issued_to_end_s: float = 0.0
    gpu_to_gpu_s: float = 0.0
    rested_issue: float = 0.0
    rested_turn: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            what = f"latencies: {field.name}"
            most = MOST_S if field.name.endswith("_s") else MOST_COLD
            value = number(getattr(self, field.name), what, at_least=0, at_most=most)
            object.__setattr__(self, field.name, value)


class Rest:
    """How cold the issuing thread's code is, as it rests and hands tasks over.

    Attributes
    ----------
    cold : float
        ``ln(1 + rest / 1 ms)`` for the first task after a rest of at least `FELT_S`, a third of it
        for the next, and so on; of several rests the one that is felt the most.
    """

    __slots__ = ("cold",)

    def __init__(self) -> None:
        self.cold = 0.0

    def before(self, rest_s: float, op: str) -> float:
        """How cold it is for a task of ``op`` that the thread turns to after a rest; 0 for those
        of `BINDS`."""
        if rest_s >= FELT_S:
            self.cold = max(self.cold, math.log1p(rest_s / _SHORT_S))
        return 0.0 if op in BINDS else self.cold

    def handed_over(self) -> None:
        """A task has been handed over."""
        self.cold *= _FADES
