"""The folder that a demonstration leaves: whole or not at all, and never in another's place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput, MachineError
from moegen.graph.files import read_json, write_json

FORMAT = "moegen.demo/1"
SUMMARY = "summary.json"
#: What lies in the folder, and what it is.
FILES = {
    "report.txt": "what is said here",
    "answers.jsonl": "the answers, one JSON object a line",
    "by_operation.csv": "predicted against measured, operation by operation",
    "throughput_vs_omega.png": "decode throughput over ω, predicted and measured",
    "throughput_vs_omega.csv": "its numbers",
    "gantt.png": "two layers of a decode step, predicted above measured",
    "trace.json": "all steps of both, to open in https://ui.perfetto.dev",
    "predicted.json": "the predicted Timeline, for moegen.Timeline.load",
    "measured.json": "the measured Timeline of the same graph",
    SUMMARY: "machine, plan, memory, times and versions",
}


@contextmanager
def results(folder: Path) -> Iterator[Path]:
    """A new folder to write in, which takes the place of ``folder`` when all went well.

    Raises
    ------
    InvalidInput
        If ``folder`` exists and is no former demonstration's, holds anything else besides, or
        cannot be made where it should be.
    MachineError
        If it cannot be written.
    """
    folder = folder.absolute()
    _refuse_foreign(folder)
    place = folder.parent
    if not place.is_dir():
        raise InvalidInput(f"{folder} cannot be made: {place} is no folder")
    if not os.access(place, os.W_OK):
        raise InvalidInput(f"{folder} cannot be made: {place} may not be written")
    with writing(folder):
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=place))
    try:
        new = temporary / "new"
        with writing(folder):
            new.mkdir()
        yield new
        _refuse_foreign(folder)  # it may have come in the meantime
        with writing(folder):
            _replace(folder, new, temporary / "old")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with a file of ``folder`` into a MachineError."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"cannot write {folder}: {error.strerror or error}") from error


def _replace(folder: Path, new: Path, old: Path) -> None:
    """Give ``new`` the name ``folder``, which is as it was before if that fails."""
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise


def _refuse_foreign(folder: Path) -> None:
    """Only a folder with nothing but a demonstration's files may be replaced."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise InvalidInput(f"{folder} is no folder: choose another one for the results")
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return
    foreign = [name for name in names if name not in FILES]
    if foreign:
        raise InvalidInput(
            f"{folder} holds {foreign[0]}, which is not of a demonstration: choose another folder, "
            "or remove it yourself"
        )
    summary = read_json(folder / SUMMARY, "the summary of a former demonstration")
    if not isinstance(summary, dict) or summary.get("format") != FORMAT:
        raise InvalidInput(
            f"{folder / SUMMARY} is not of a demonstration: choose another folder, or remove it "
            "yourself"
        )


def write_summary(folder: Path, data: dict[str, Any]) -> None:
    write_json(folder / SUMMARY, {"format": FORMAT, **data}, "the summary", indent=2)
