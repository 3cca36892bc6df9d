"""The file of answers: written row by row, whole under its own name or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import Request

Row = dict[str, Any]


class Output:
    """The file that a job writes: ``path.partial`` while it runs, ``path`` when it is complete.

    Parameters
    ----------
    path : path
    requests : sequence of Request
    **settings
        What else decides the answers (the model, the number format). A ``.partial`` whose
        requests or settings differ is another job's.

    Raises
    ------
    InvalidInput
        If ``path``, or another job's ``.partial``, exists, or there is no folder to write in.
    """

    def __init__(self, path: str | Path, requests: Sequence[Request], **settings: Any) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        what = json.dumps([[asdict(r) for r in requests], settings], sort_keys=True)
        self._header = {"job": hashlib.sha256(what.encode()).hexdigest()}
        self._order = [request.id for request in requests]
        self._rows: dict[str | int, Row] = {}
        self._file: IO[str] | None = None
        self._done = False
        if self.path.exists():
            raise InvalidInput(
                f"{self.path} exists already: choose another --output, or remove it first"
            )
        require_writable(self.path)
        if self.partial.exists() and not self._is_ours():
            raise InvalidInput(
                f"{self.partial} belongs to another job, with other requests or settings: "
                "choose another --output, or remove it first"
            )

    def _is_ours(self) -> bool:
        try:
            with self.partial.open(encoding="utf-8") as file:
                return json.loads(file.readline()) == self._header
        except (OSError, ValueError):
            return False

    @property
    def kept(self) -> str:
        """Where the answers of a job that fails now are to be found: a sentence, or nothing."""
        if self._done:
            return f" All answers are in {self.path}."
        answered = any("error" not in row for row in self._rows.values())
        return f" Rows finished so far are in {self.partial}." if answered else ""

    @property
    def _earlier(self) -> Path:
        return self.partial.with_name(self.partial.name + ".old")

    def start(self) -> None:
        """Begin the partial file; an earlier try's is kept until this one has answers."""
        with self._writing():
            if self.partial.exists():
                os.replace(self.partial, self._earlier)
            self._file = self.partial.open("w", encoding="utf-8")
        self._write(self._header)

    def add(self, row: Row) -> None:
        """Write one finished row through to the file."""
        if row["id"] not in self._rows:
            self._write(row)
            self._rows[row["id"]] = row

    def finish(self) -> None:
        """Put the rows in the order of the requests, under the final name."""
        assert self._file is not None
        ordered = self.path.with_name(self.path.name + ".ordered")
        with self._writing():
            self._file.close()
            try:
                with ordered.open("w", encoding="utf-8") as file:
                    file.writelines(_line(self._rows[id]) for id in self._order)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(ordered, self.path)
            except BaseException:
                ordered.unlink(missing_ok=True)
                raise
            self._done = True
            self.partial.unlink()
            self._earlier.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Close the partial file after a failure; remove it if no request was answered."""
        if self._file is None:
            return
        with suppress(OSError):  # what went wrong before is the news
            self._file.close()
        with suppress(OSError):
            if self.kept:
                self._earlier.unlink(missing_ok=True)
            elif self._earlier.exists():
                os.replace(self._earlier, self.partial)
            else:
                self.partial.unlink(missing_ok=True)

    def _write(self, row: Row) -> None:
        assert self._file is not None
        with self._writing():
            self._file.write(_line(row))
            self._file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"cannot write {self.path}: {error.strerror or error}.{self.kept}"
            ) from error


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def require_writable(path: Path) -> None:
    """Refuse a path that no file can be written to, before any work is done for it.

    Raises
    ------
    InvalidInput
        If it is a folder, or its folder is missing or closed.
    """
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path.parent} is no folder: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidInput(f"{path} may not be written: choose another place")
