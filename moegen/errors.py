"""What can go wrong, sorted by whose move it is next.

Every error a person may see derives from :class:`MoegenError`. Its message says
what was wrong, where, the limit, the shortfall and what to do. The command line
maps each class to an exit code; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations


class MoegenError(Exception):
    """Base of every error that moegen raises on purpose."""

    exit_code = 1


class InvalidInput(MoegenError, ValueError):
    """A file, key, flag or argument is wrong (exit code 2)."""

    exit_code = 2


class Infeasible(MoegenError):
    """A strategy does not fit the machine (exit code 3).

    Parameters
    ----------
    message : str
        The full sentence for a person.
    line : str, optional
        The ledger section that broke, ``"host"`` or ``"gpu"``.
    limit_bytes, need_bytes : int, optional
        What there is and what was asked for.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        line: str | None = None,
        limit_bytes: int | None = None,
        need_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.line = line
        self.limit_bytes = limit_bytes
        self.need_bytes = need_bytes

    @property
    def shortfall_bytes(self) -> int | None:
        """Bytes missing, or None when the limit is not one of bytes."""
        if self.limit_bytes is None or self.need_bytes is None:
            return None
        return max(0, self.need_bytes - self.limit_bytes)


class MachineError(MoegenError):
    """The machine failed: no space, no memory, no device (exit code 1)."""

    exit_code = 1


class GraphError(MoegenError):
    """A task graph is malformed: a cycle, a read nobody wrote, an unknown op."""


class DeadlockError(MoegenError):
    """A run ended, or stalled, before every task had its end time."""
