"""Leaving in the middle: on Ctrl-C, and on the SIGTERM of a batch system."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from moegen.cli.console import say


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they kill: handled as Ctrl-C is."""


def _terminate(*_: object) -> None:
    raise _Terminated


@contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """Leave on Ctrl-C and SIGTERM with an exit code that says so, 130 or 143.

    ``kept`` is asked then what there is of the work: a sentence after a blank, or nothing.
    """
    handles = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if handles else None
    try:
        yield
    except KeyboardInterrupt as stop:
        code = 128 + (signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT)
        say(f"moegen: stopped.{kept()}")
        raise typer.Exit(code) from None
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)
