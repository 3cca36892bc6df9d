"""What it takes one side to notice that another has finished."""

from __future__ import annotations

from dataclasses import dataclass, fields

from moegen.graph.checks import number


@dataclass(frozen=True)
class Latencies:
    """Seconds from the end of a task to what waits for it, where no stream waits by itself.

    Parameters
    ----------
    gpu_to_host_s : float
        From a GPU's task to the issuing thread, which asks now and then.
    cpu_to_host_s : float
        From a task of the CPU lane to the issuing thread, which is woken.
    gpu_to_cpu_s : float
        From a GPU's task to the start of one of the CPU lane.

    Raises
    ------
    InvalidInput
        If one is negative or not finite.
    """

    gpu_to_host_s: float = 0.0
    cpu_to_host_s: float = 0.0
    gpu_to_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = number(getattr(self, field.name), f"latencies: {field.name}", at_least=0)
            object.__setattr__(self, field.name, value)
