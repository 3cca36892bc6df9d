"""The decode attention in C++: compiled on first use, kept in the cache, called without the GIL.

`library` gives it or says why there is none. Processes that meet the same empty cache each
compile for themselves and put the result in place in one step, so none waits for another and
none sees half a file.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from moegen.cache import cache_folder

_HERE = Path(__file__).parent
_MAIN = _HERE / "cpu_attention.cpp"
_SOURCES = tuple(sorted(_HERE.glob("cpu_attention*.h"))) + (_MAIN,)
# No -march: the file may lie in a home directory that several machines share.
_FLAGS = ("-O2", "-ffp-contract=fast", "-pthread", "-Wno-psabi")
_CHECK_BYTES = hashlib.sha256().digest_size
_NAME = "moegen_cpu_attention"
_lock = threading.Lock()


class Unavailable(Exception):
    """Why there is no compiled kernel."""


class Library(NamedTuple):
    """The loaded kernel.

    Attributes
    ----------
    functions : ctypes.CDLL
    variants : dict of str to int
        Those that run on this machine, the best first, with what `moegen_open` calls them.
    not_kept : str or None
        Why the next process will compile it again.
    """

    functions: ctypes.CDLL
    variants: dict[str, int]
    not_kept: str | None = None


def library(*defines: str) -> Library:
    """The compiled kernel, from the cache if it is there.

    Parameters
    ----------
    *defines : str
        Preprocessor flags: tests ask for a variant that no machine runs by itself.

    Raises
    ------
    Unavailable
        If it cannot be compiled or loaded.
    """
    with _lock:
        found = _library(defines)
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@cache
def _library(defines: tuple[str, ...]) -> Library | str:
    if sys.platform == "win32":
        return "it needs Linux or macOS"
    place = _place(defines)
    if place is not None and _whole(place):
        with suppress(OSError):  # of another system: made anew
            return _load(place)
    try:
        return _make(defines, place)
    except Unavailable as e:
        return str(e)


def _place(defines: tuple[str, ...]) -> Path | None:
    """Where the compiled file is kept; None where there is no home directory for it."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *defines, sys.platform)).encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        root = Path(named) if named else cache_folder() / "kernels"
    except RuntimeError:
        return None
    return root / f"{_NAME}-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def _whole(place: Path) -> bool:
    """Whether a kept file ends with its checksum: to load part of one ends the process."""
    try:
        data = place.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_CHECK_BYTES]).digest() == data[-_CHECK_BYTES:]


def _make(defines: tuple[str, ...], place: Path | None) -> Library:
    """Compile in a folder of this process alone, then put the result in its place."""
    not_kept = None if place else "there is no home directory"
    try:
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="build-", dir=place and place.parent)
    except OSError as e:
        place, not_kept = None, str(e)  # it serves this process only
        try:
            folder = tempfile.mkdtemp(prefix="moegen-build-")
        except OSError as e:
            raise Unavailable(f"there is no folder to compile in: {e}") from e
    try:
        made = _compile(defines, folder)
        if place is not None:
            # A new file: macOS remembers the signature of one that was loaded, as torch does.
            data, whole = made.read_bytes(), Path(folder) / "whole"
            whole.write_bytes(data + hashlib.sha256(data).digest())
            os.replace(whole, place)
            made = place
        return _load(made)._replace(not_kept=not_kept)
    except OSError as e:
        raise Unavailable(f"what was compiled cannot be loaded: {e}") from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(defines: tuple[str, ...], folder: str) -> Path:
    with _own_programs(), _quiet("torch.utils.cpp_extension"):
        try:
            from torch.utils import cpp_extension

            made = cpp_extension.load(
                name=_NAME,
                sources=[str(_MAIN)],
                extra_cflags=[*_FLAGS, *defines],
                # Of torch's libraries, which the loader names, it needs none.
                extra_ldflags=["-Wl,--as-needed"] if sys.platform == "linux" else None,
                build_directory=folder,
                with_cuda=False,
                is_python_module=False,
            )
        except Exception as e:  # the loader raises what its tools do, and they are many
            raise Unavailable(_reason(e)) from e
    return Path(str(made))


def _reason(e: Exception) -> str:
    """A line out of what a compiler may have filled pages with."""
    text = str(e)
    if "inja is required" in text:
        return "ninja is not installed (pip install ninja)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "error" in line.lower() or "not found" in line]
    line = (told[1:2] or told or lines or [type(e).__name__])[0]
    return f"it could not be compiled (on Debian and Ubuntu: apt install g++): {line[:200]}"


@contextmanager
def _own_programs() -> Iterator[None]:
    """ninja lies beside this Python, which PATH need not name."""
    before = os.environ.get("PATH")
    beside = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([before, beside] if before else [beside])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """A logger that says nothing: what goes wrong is told by `Unavailable`, in a line."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _load(path: Path) -> Library:
    f = ctypes.CDLL(str(path))
    pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    f.moegen_variant.restype = ctypes.c_char_p
    f.moegen_variant.argtypes = [integer, ctypes.POINTER(integer)]
    f.moegen_open.restype = pointer
    f.moegen_open.argtypes = [integer, integer]
    f.moegen_close.restype = None
    f.moegen_close.argtypes = [pointer]
    f.moegen_read.restype = integer
    f.moegen_read.argtypes = [pointer, pointer, number, ctypes.POINTER(ctypes.c_uint64)]
    f.moegen_decode.restype = integer
    f.moegen_decode.argtypes = [
        *(pointer, integer, number, pointer, pointer),  # handle, dtype, rows, start, length
        *(pointer, number, pointer, number, pointer, number, pointer, number),
        *(integer, integer, integer, integer, integer),  # heads, KV heads, dk, dv, latent
        *(ctypes.c_float, number, pointer),  # scale, window, sinks
    ]
    f.moegen_stretches.restype = number
    f.moegen_stretches.argtypes = [number]
    variants: dict[str, int] = {}
    works, i = integer(), 0
    while (name := f.moegen_variant(i, ctypes.byref(works))) is not None:
        if works.value:
            variants[name.decode()] = i
        i += 1
    return Library(f, variants)
