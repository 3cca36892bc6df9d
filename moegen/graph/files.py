"""Files of JSON: read with errors that name the file, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput, MachineError

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
    try:
        _write(Path(path), data)
    except OSError as e:
        fault = InvalidInput if e.errno in _OF_THE_PATH else MachineError
        raise fault(f"cannot write {what} to {path}: {e.strerror or e}") from e
    except (ValueError, TypeError) as e:
        raise InvalidInput(f"cannot write {what} to {path!r}: {e}") from e


def _write(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():  # a pipe or a device cannot be renamed over
        path.write_bytes(data)
        return
    path = path.resolve()  # where a link leads, so that the link stays
    part = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
