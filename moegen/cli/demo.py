"""``moegen demo``: a checkpoint to try moegen with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from moegen.cache import cache_folder


def demo(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where it goes; your cache directory unless given."),
    ] = None,
) -> None:
    """Make a small checkpoint that speaks English (1.5 GB), unless it is there already."""
    from moegen.demo import make_checkpoint

    folder = make_checkpoint(folder or cache_folder() / "demo-moe", say=_say)
    print(f"""Ask it something:
echo '{{"id": "paris", "prompt": "The capital of France is"}}' > requests.jsonl
moegen run --model {shlex.quote(str(folder))} --input requests.jsonl --output answers.jsonl \
--max-tokens 32""")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
