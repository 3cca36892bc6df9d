"""What passes between the issuing thread and who works for it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from moegen.graph.checks import number

#: More than any takes: a run would seem to stand still.
MOST_S = 60.0


@dataclass(frozen=True)
class Latencies:
    """Seconds from the end of a task to what waits for it; and from the issuing thread to a GPU
    that waits for what it launches.

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

    Raises
    ------
    InvalidInput
        If one is negative or above `MOST_S`.
    """

    gpu_to_host_s: float = 0.0
    cpu_to_host_s: float = 0.0
    gpu_to_cpu_s: float = 0.0
    issue_to_start_s: float = 0.0
    issued_to_end_s: float = 0.0
    gpu_to_gpu_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            what = f"latencies: {field.name}"
            value = number(getattr(self, field.name), what, at_least=0, at_most=MOST_S)
            object.__setattr__(self, field.name, value)
