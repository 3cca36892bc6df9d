"""Threads of a run, and what they ask of the system."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_PR_SET_TIMERSLACK = 29


class Worker(threading.Thread):
    """A thread that can be waited for again after an interrupt.

    Before Python 3.13 a KeyboardInterrupt inside ``join`` makes a live thread look ended.

    Parameters
    ----------
    name : str
    target, *args
        What it does.
    torch_threads : int, optional
        Threads that torch starts for one of its operations; torch's own choice unless given.
    """

    def __init__(
        self,
        name: str,
        target: Callable[..., None],
        *args: object,
        torch_threads: int | None = None,
    ) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)
        self._torch_threads = torch_threads
        self._begun, self._ended = threading.Event(), threading.Event()

    def start(self) -> None:
        if self._torch_threads is None:
            super().start()
            return
        with own_torch_threads():
            try:
                super().start()
                self._begun.wait()
            finally:  # after an interrupt too: what it sets is put back only then
                if self.ident is not None:
                    self._begun.wait()

    def run(self) -> None:
        try:
            if self._torch_threads is not None:
                try:
                    use_torch_threads(self._torch_threads)
                finally:
                    self._begun.set()
            super().run()
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait until it has ended; after an interrupt, call it again."""
        self._ended.wait()
        self.join()


@contextmanager
def own_torch_threads() -> Iterator[None]:
    """Threads started inside may set how many threads torch uses for them, and only for them.

    ``torch.set_num_threads`` also sets what threads started later begin with; that is put
    back at the end.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_torch_threads(n: int) -> None:
    """Let torch use ``n`` threads for what the calling thread does."""
    torch.get_num_threads()  # a thread's first look takes over what is set for all: do it now
    torch.set_num_threads(n)


def short_sleeps() -> None:
    """Let the calling thread sleep for 20 us and not for 70, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
