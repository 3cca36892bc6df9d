"""The file of answers: written row by row, whole under its own name or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import Request

Row = dict[str, Any]


class Output:
    """The file that a job writes: ``path.partial`` while it runs, ``path`` when it is complete.

    It is locked from the beginning, before a model is prepared or loaded for it, until `finish`
    or `abandon`; as a context it is abandoned where it was not finished.

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
        If ``path``, or another job's ``.partial``, exists, another process is writing it, or
        there is no folder to write in.
    """

    def __init__(self, path: str | Path, requests: Sequence[Request], **settings: Any) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        what = json.dumps([[asdict(r) for r in requests], settings], sort_keys=True)
        self._header = {"job": hashlib.sha256(what.encode()).hexdigest()}
        self._order = [request.id for request in requests]
        self._rows: dict[str | int, Row] = {}
        self._begun = self._done = False
        self._require_new()
        require_writable(self.path)
        for file in (self.partial, self._earlier):
            self._require_ours(file)
        with self._writing():
            self._file = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abandon()

    def _require_new(self) -> None:
        if self.path.exists():
            raise InvalidInput(
                f"{self.path} exists already: choose another --output, or remove it first"
            )

    def _require_ours(self, file: Path) -> None:
        if file.exists() and not self._is_ours(file):
            raise InvalidInput(
                f"{file} belongs to another job, with other requests or settings: "
                "choose another --output, or remove it first"
            )

    def _is_ours(self, file: Path) -> bool:
        try:
            with file.open(encoding="utf-8") as lines:
                first = lines.readline()
                return not first or json.loads(first) == self._header  # a kill leaves it empty
        except (OSError, ValueError):
            return False

    def _lock(self, file: IO[str]) -> None:
        if not _locked(file):
            raise InvalidInput(
                f"another process is writing {self.partial}: wait for it, or choose another "
                "--output"
            )

    @property
    def kept(self) -> str:
        """Where the answers of a job that fails now are to be found: a sentence, or nothing."""
        if self._done:
            return f" All answers are in {self.path}."
        if self._answered:
            return f" Rows finished so far are in {self.partial}."
        if self._earlier.exists() or _has_answer(self.partial):
            return f" Rows of an earlier try are in {self.partial}."
        return ""

    @property
    def _answered(self) -> bool:
        return any("error" not in row for row in self._rows.values())

    @property
    def _earlier(self) -> Path:
        return self.partial.with_name(self.partial.name + ".old")

    def start(self) -> None:
        """Begin the partial file; an earlier try's answers are kept beside it until this one ends.

        Raises
        ------
        InvalidInput
            If there is a file of the final name by now.
        """
        self._require_new()
        with self._writing():
            if _has_answer(self.partial):
                os.replace(self.partial, self._earlier)
                answered, self._file = self._file, self._opened()
                answered.close()
            self._file.truncate(0)
        self._begun = True
        self._write(self._header)

    def _opened(self) -> IO[str]:
        """The partial file, locked: until it is closed no other process writes to it."""
        while True:
            file = self.partial.open("a", encoding="utf-8")
            try:
                self._lock(file)
                self._require_new()
                self._require_ours(self.partial)
                if os.path.samestat(os.fstat(file.fileno()), self.partial.stat()):
                    return file
            except FileNotFoundError:
                pass  # its owner put it away before it was locked here
            except BaseException:
                file.close()
                raise
            file.close()

    def add(self, row: Row) -> None:
        """Write one finished row through to the file."""
        if row["id"] not in self._rows:
            self._write(row)
            self._rows[row["id"]] = row

    def finish(self) -> None:
        """Put the rows in the order of the requests, under the final name.

        Raises
        ------
        InvalidInput
            If there is a file of that name by now.
        """
        ordered = self.path.with_name(self.path.name + ".ordered")
        with self._writing():
            try:
                with ordered.open("w", encoding="utf-8") as file:
                    file.writelines(_line(self._rows[id]) for id in self._order)
                    file.flush()
                    os.fsync(file.fileno())
                _publish(ordered, self.path)
            except FileExistsError as error:
                raise InvalidInput(
                    f"{self.path} exists by now, and is not overwritten. All answers are in "
                    f"{self.partial}, in the order in which they finished."
                ) from error
            finally:
                ordered.unlink(missing_ok=True)
            self._done = True
            # In this order: who gets the lock sees that the job is done.
            self._file.close()
            self.partial.unlink()
            self._earlier.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Close the partial file after a failure; remove it if no request was answered.

        The answers of an earlier try stay. Nothing is done after `finish`.
        """
        if self._file.closed:
            return
        with suppress(OSError):  # what went wrong before is the news
            if self._answered:
                self._earlier.unlink(missing_ok=True)
            elif not self._begun and _has_answer(self.partial):
                pass
            elif self._earlier.exists():
                os.replace(self._earlier, self.partial)
            else:
                self.partial.unlink(missing_ok=True)
        with suppress(OSError):  # last, for it gives up the lock
            self._file.close()

    def _write(self, row: Row) -> None:
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


def _has_answer(partial: Path) -> bool:
    """Whether a partial file holds the answer of a request; a torn last line is none."""
    try:
        with partial.open("rb") as lines:
            return any(_is_answer(line) for line in lines)
    except FileNotFoundError:
        return False


def _is_answer(line: bytes) -> bool:
    try:
        return "text" in json.loads(line)
    except ValueError:
        return False


def _locked(file: IO[str]) -> bool:
    """Lock a file until it is closed; False if another process has locked it."""
    if sys.platform == "win32":
        return True  # an open file cannot be renamed or removed there
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # some network file systems have no locks
    return True


def _publish(ordered: Path, path: Path) -> None:
    """Give a file its final name; FileExistsError if that is taken."""
    try:
        os.link(ordered, path)  # a rename would replace what is there
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(ordered, path)


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
