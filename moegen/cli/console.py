"""What commands print: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

# Where stderr is no terminal, a line is written so often.
LINE_EVERY_S = 10.0


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


def say(*lines: str) -> None:
    """Lines for a person, on stderr; work goes on if nobody reads them any more."""
    with suppress(OSError):
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def warn(notes: Iterable[str]) -> None:
    say(*(f"moegen: warning: {note}" for note in notes))


@contextmanager
def patience(text: str, after_s: float = 1.0) -> Iterator[None]:
    """Say why something takes its time, if it does."""
    timer = threading.Timer(after_s, say, (text,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# On a machine's first run this takes some seconds.
CHOOSING = "Choosing a plan. A machine's rates are measured on its first run, and kept ..."


class Bar:
    """How far something has come: a bar on a terminal, else a line now and then.

    Parameters
    ----------
    name : str
        Of what goes on; `update` may give another.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._said = self._shown = ""
        self._next_s = time.monotonic() + LINE_EVERY_S
        self._rich: Any = None
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description:<7}"),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[said]}"),
            )
            self._rich = Progress(*columns, console=Console(stderr=True))
            self._task = self._rich.add_task(name, total=None, said="")

    def update(self, done: float, total: float, said: str, name: str | None = None) -> None:
        """Show ``done`` of ``total``, and ``said`` beside it."""
        self.name, self._said = name or self.name, said
        if self._rich is not None:
            self._rich.update(
                self._task, description=self.name, completed=done, total=total, said=said
            )
        elif time.monotonic() >= self._next_s:
            self._line()

    def _line(self) -> None:
        line = f"{self.name:<7} {self._said}"
        if self._said and line != self._shown:
            say(line)
        self._shown, self._next_s = line, time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> Self:
        if self._rich is not None:
            with suppress(OSError):  # as in `say`
                self._rich.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._rich is not None:
            with suppress(OSError):
                self._rich.stop()
        else:
            self._line()


class Loading(Bar):
    """A bar of bytes; call it with those loaded and those in all."""

    def __init__(self) -> None:
        super().__init__("loading")
        self._began_s = time.perf_counter()
        self.bytes = 0

    def __call__(self, done: int, total: int) -> None:
        seconds = time.perf_counter() - self._began_s
        rate = done / seconds / 1e9 if seconds else 0.0
        self.bytes = done
        self.update(done, total, f"{done / 1e9:.2f}/{total / 1e9:.2f} GB, {rate:.2f} GB/s")
