"""``moegen demo``: everything once, from a checkpoint to pictures of what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegen.cli import story
from moegen.cli.console import Bar, Loading, print_json, say
from moegen.cli.flags import Device, Json
from moegen.cli.interrupt import interruptible
from moegen.cli.words import opening

if TYPE_CHECKING:
    from moegen.demo.show import Shown
    from moegen.exec.generate import StepReport
    from moegen.jobs import Pace, Report


def demo(
    folder: Annotated[
        Path,
        typer.Option(
            "--folder", help="Where the results go; those of a former demo there are replaced."
        ),
    ] = Path("moegen-demo"),
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            help="Where the checkpoint is kept (1.5 GB); your cache directory unless given.",
        ),
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer some prompts with a small model, and show what was predicted and what happened.

    Makes a checkpoint that speaks English, unless it is there already, and runs it with so little
    GPU memory that its weights stream. The results folder then holds the answers, tables, pictures
    and a trace. Exit 1 if a text is not what the model says when transformers runs it.

    Examples::

        moegen demo
        moegen demo --folder results --device cpu
    """
    from moegen.demo.show import show

    with interruptible(lambda: f" {folder} is as it was before."):
        shown = show(folder, _Console(), checkpoint=checkpoint, device=device)
    if as_json:
        print_json(shown.to_dict())
    else:
        print("\n".join(story.told(shown)))
    if shown.differing:
        raise typer.Exit(1)


class _Console:
    """Progress on stderr, the report for its file."""

    def say(self, text: str) -> None:
        say(text)

    def planned(self, report: Report) -> None:
        say(*opening(report))

    def loading(self) -> Loading:
        return Loading()

    @contextmanager
    def running(self, pace: Pace) -> Iterator[Callable[[StepReport], None]]:
        with Bar("prefill") as bar:

            def on_step(step: StepReport) -> None:
                pace.on_step(step)
                bar.update(pace.tokens_done, pace.tokens, str(pace), pace.phase)

            yield on_step

    def report(self, shown: Shown) -> str:
        return "\n".join(story.told(shown)) + "\n"
