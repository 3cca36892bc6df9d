"""Host memory that the GPU copies from at full speed: page-aligned, registered with CUDA.

Ordinary memory that is touched first and registered then is ready six times sooner than
memory that CUDA allocates, and is not rounded up to a power of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moegen.errors import MachineError
from moegen.units import format_bytes

_HUGE = 2 * 1024 * 1024
_PAGE = 4096
_MADV_HUGEPAGE = 14
# A limit on locked memory up to this is tried out rather than believed.
_PROBE = 256 * 1024 * 1024


def host_buffer(nbytes: int, *, huge: bool = False) -> Tensor:
    """An uninitialised uint8 buffer with pages of its own.

    Whole pages, because memory is registered by the page: two buffers that shared one could
    not both be registered.

    Parameters
    ----------
    nbytes : int
    huge : bool
        Ask for huge pages: fewer to register. The system may take longer to find them.

    Raises
    ------
    MachineError
        If there is not that much memory.
    """
    page = _HUGE if huge and nbytes >= 4 * _HUGE else _PAGE
    try:
        raw = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8)
    except RuntimeError as e:
        raise MachineError(
            f"{format_bytes(nbytes)} of host memory in one piece are not to be had: {e}"
        ) from e
    start = -raw.data_ptr() % page
    if page == _HUGE:
        _advise_huge(raw.data_ptr() + start, raw.nbytes - page)
    return raw[start : start + nbytes]


def _advise_huge(address: int, nbytes: int) -> None:
    # Only advice: where the kernel has no huge pages to give, it gives small ones.
    if sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)


def locking_problem(nbytes: int) -> str | None:
    """Why the system would not let this process pin ``nbytes``, or None if nothing says so.

    The limit on locked memory (``ulimit -l``) is raised as far as the process may. Where it stays
    too low a small registration beyond it shows whether the driver minds: many do not.
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < nbytes and soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems keep the soft limit
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= nbytes or not _enforced(soft):
        return None
    return (
        f"the limit on locked memory is {format_bytes(soft)}, and {format_bytes(nbytes)} are to be "
        f"pinned, {format_bytes(nbytes - soft)} more: raise it (ulimit -l unlimited, or "
        f"--ulimit memlock=-1 for a container)"
    )


def _enforced(limit: int) -> bool:
    """Whether registering a little more than ``limit`` fails; large limits are not tried out."""
    if limit > _PROBE:
        return True
    pins = Pins()
    reason = pins.register([host_buffer(limit + _HUGE).zero_()])
    pins.unregister()
    return reason is not None


class Pins:
    """Buffers registered with the CUDA driver, until :meth:`unregister`."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self.complete = False
        # Memory must not be freed while it is registered: the list keeps the buffers alive,
        # and goes only after they have been given back.
        self._finalizer = weakref.finalize(self, _give_back, self._held)
        self._finalizer.atexit = False

    def register(self, buffers: Sequence[Tensor]) -> str | None:
        """Register every buffer, or none: what went wrong, or None.

        The memory should have been written before: registering memory that was never touched
        makes one thread clear all of it.
        """
        if self.complete:
            return None
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        torch.cuda.init()
        for t in buffers:
            if not t.nbytes:
                continue
            status = int(_cudart().cudaHostRegister(t.data_ptr(), t.nbytes, 0))
            if status != 0:
                _clear_error()
                self.unregister()
                return (
                    f"cudaHostRegister of {format_bytes(t.nbytes)} failed with CUDA error "
                    f"{status}; the limit on locked memory (ulimit -l) may be too low"
                )
            self._held.append(t)
        self.complete = True
        return None

    def unregister(self) -> None:
        """Give every registration back; no copy from the buffers may be under way."""
        _give_back(self._held)
        self.complete = False


@contextlib.contextmanager
def pinned_zeros(nbytes: int, device: torch.device) -> Iterator[tuple[Tensor, str | None]]:
    """Bytes of host memory to copy from and to, registered while the context lasts if on CUDA.

    Yields them, and why they could not be registered, or None. At the end nothing may use them.
    """
    data = host_buffer(nbytes).zero_()  # touched before it is registered
    pins = Pins()
    problem = pins.register([data]) if device.type == "cuda" else None
    try:
        yield data, problem
    finally:
        pins.unregister()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _give_back(held: list[Tensor]) -> None:
    for t in held:
        _cudart().cudaHostUnregister(t.data_ptr())
    held.clear()


def _clear_error() -> None:
    # CUDA keeps a failed call's error until someone asks, and the next launch would get it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
