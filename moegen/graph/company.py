"""What a resource gives in company: less than alone, where another one is in use beside it.

CPU attention and copies read the same memory, and the link's two directions share parts of it, but
neither adds up to one rate: on an H200 the link gives 55 GB/s alone and 47 beside CPU attention,
which gets 86 of its 97. So the share that each keeps is measured, pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from moegen.errors import InvalidInput
from moegen.graph.checks import number

#: What lanes share. GPU, CPU and the executor's host code ("issue") are counted in seconds of the
#: whole, the rest in bytes: those of kernels that read and write the host's memory over the link
#: also as "zero_copy".
RESOURCES = ("gpu", "h2d", "d2h", "zero_copy", "host_memory", "cpu", "issue")


@dataclass(frozen=True)
class Company:
    """What is left of one resource while another one is in full use.

    Parameters
    ----------
    resource : str
        The one that gives less: one of `RESOURCES`.
    beside : str
        The other one.
    share : float
        What ``resource`` gives then, of what it gives alone: above 0, at most 1.
    source : str
        How it was measured.

    Raises
    ------
    InvalidInput
        If a resource is not known, both are the same, or the share is out of range.
    """

    resource: str
    beside: str
    share: float
    source: str

    def __post_init__(self) -> None:
        for field in ("resource", "beside"):
            name = getattr(self, field)
            if name not in RESOURCES:
                raise InvalidInput(
                    f"company: {field} must be one of {', '.join(RESOURCES)}, got {name!r}"
                )
        if self.resource == self.beside:
            raise InvalidInput(f"company: {self.resource} cannot be beside itself")
        share = number(self.share, f"company: the share of {self}", above=0)
        if share > 1:
            raise InvalidInput(f"company: the share of {self} must be at most 1, got {share:g}")
        object.__setattr__(self, "share", share)
        if not isinstance(self.source, str) or not self.source:
            raise InvalidInput(
                f"company: source of {self} must say how it was measured, got {self.source!r}"
            )

    def __str__(self) -> str:
        return f"{self.resource} beside {self.beside}"
