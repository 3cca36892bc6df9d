"""What commands print: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moegen.jobs import Row


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


def warn(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"moegen: warning: {note}", file=sys.stderr)


@contextmanager
def loading() -> Iterator[Any]:
    """A bar on stderr; yields what to call with the bytes loaded and those in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def progress(n_rows: int) -> Iterator[Any]:
    """A bar on stderr; yields what to call with every finished row and every step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("rows"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[phase]} {task.fields[rate]:.1f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rows", total=n_rows, phase="", rate=0.0)

        def on_row(row: Row) -> None:
            bar.update(task, advance=1)

        def on_step(step: Any) -> None:
            bar.update(task, phase=step.phase, rate=step.tokens_done / step.elapsed_s)

        yield on_row, on_step
