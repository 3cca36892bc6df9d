"""Files of JSON: read with errors that name the file, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput, MachineError

# Where a file of so many bytes cannot be written, no larger one can.
_SMALL = 4096
# Another path would do; anything else is a fault of the machine.
_OF_THE_PATH = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}


def read_json(path: str | Path, what: str) -> Any:
    """The content of ``path``; ``what`` is what errors call it.

    Raises
    ------
    InvalidInput
        If the file cannot be read or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise InvalidInput(f"cannot read {what} {path}: {e.strerror or e}") from e
    except json.JSONDecodeError as e:
        raise InvalidInput(f"{path} is not JSON: line {e.lineno}: {e.msg}") from e
    except UnicodeDecodeError as e:
        raise InvalidInput(f"{what} is damaged: {path} is not UTF-8 text ({e.reason})") from e
    except RecursionError as e:
        raise InvalidInput(f"{what} is damaged: {path} is nested too deeply") from e
    except (ValueError, TypeError) as e:  # a path that is none; digits without end
        raise InvalidInput(f"cannot read {what} {path!r}: {e}") from e


def write_json(path: str | Path, data: Any, what: str, **options: Any) -> None:
    """Write ``data`` to ``path``, which holds all of it afterwards or is as it was.

    Raises
    ------
    InvalidInput
        If the data are not JSON, or no file may be at ``path``.
    MachineError
        If the machine cannot write it, as where the disk is full.
    """
    try:
        text = json.dumps(data, allow_nan=False, **options)
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidInput(f"cannot write {what}: it holds what is not JSON: {e}") from e
    write_text(path, text, what)


def write_text(path: str | Path, text: str, what: str) -> None:
    """Write ``text`` to ``path``, which holds all of it afterwards or is as it was.

    Raises
    ------
    InvalidInput
        If no file may be at ``path``.
    MachineError
        If the machine cannot write it, as where the disk is full.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InvalidInput(f"cannot write {what} to {path}: {e}") from e
    write_bytes(path, data, what)


def write_bytes(path: str | Path, data: bytes, what: str) -> None:
    """Write ``data`` to ``path``, which holds all of it afterwards or is as it was.

    Raises
    ------
    InvalidInput
        If no file may be at ``path``.
    MachineError
        If the machine cannot write it, as where the disk is full.
    """
    with _writing(path, what):
        _write(Path(path), data)


def try_to_write(path: str | Path, what: str) -> None:
    """Refuse what :func:`write_bytes` would, as far as a small file beside ``path`` tells.

    What is at ``path`` stays as it is, and no other file is left.

    Raises
    ------
    InvalidInput
        If no file may be at ``path``.
    MachineError
        If the machine cannot write it, as where the disk is full.
    """
    with _writing(path, what):
        _try(Path(path))


@contextmanager
def _writing(path: str | Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        fault = InvalidInput if e.errno in _OF_THE_PATH else MachineError
        raise fault(f"cannot write {what} to {path}: {e.strerror or e}") from e
    except (ValueError, TypeError) as e:
        raise InvalidInput(f"cannot write {what} to {path!r}: {e}") from e


def _special(path: Path) -> bool:
    """Whether it is a pipe or a device, which cannot be renamed over."""
    return path.exists() and not path.is_file()


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _try(path: Path) -> None:
    if not _special(path):
        part = _part(path.resolve())
        try:
            part.write_bytes(bytes(_SMALL))
        finally:
            part.unlink(missing_ok=True)
    elif path.is_char_device():  # a pipe would wait for who reads it
        file = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            os.write(file, b"")
        finally:
            os.close(file)


def _write(path: Path, data: bytes) -> None:
    if _special(path):
        path.write_bytes(data)
        return
    path = path.resolve()  # where a link leads, so that the link stays
    part = _part(path)
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
