"""What the Triton kernels ask of the machine, said before a kernel fails obscurely."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from moegen.errors import MachineError


def padded(d: int) -> int:
    """``d`` as Triton's ranges and products want it: a power of two, at least 16."""
    return max(16, 1 << (d - 1).bit_length())


_OR_CPU = "or run on the CPU with device='cpu'"


def require_triton() -> None:
    """Check that Triton can be imported and can compile, and say what is missing.

    Triton turns a kernel into machine code by itself, but compiles the small C function that
    launches it with the machine's C compiler, against the headers of this Python. Nothing is
    compiled here, so the check takes microseconds. With ``TRITON_INTERPRET=1`` kernels run as
    Python on CPU tensors, and Triton itself is all they need.

    Raises
    ------
    MachineError
        If Triton, a C compiler (``gcc``, ``clang``, or what ``CC`` names) or ``Python.h`` is
        missing.
    """
    if find_spec("triton") is None:
        raise MachineError(
            "moegen's CUDA kernels need Triton, which is not installed. CUDA builds of torch "
            f"for Linux bring it along: install one of those, {_OR_CPU}"
        )
    if os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "y", "yes"}:
        return
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        raise MachineError(
            f"Triton needs a C compiler to launch its kernels, and CC={named!r} names no program "
            f"on this machine: correct or unset CC, {_OR_CPU}"
        )
    if named is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        raise MachineError(
            "Triton needs a C compiler to launch its kernels, and neither gcc nor clang is on "
            "the PATH: install one (on Debian and Ubuntu: apt install gcc), or name another in "
            f"the environment variable CC, {_OR_CPU}"
        )
    # Debian's default scheme points below /usr/local; Triton looks where the headers really are.
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    headers = Path(sysconfig.get_path("include", scheme))
    if not (headers / "Python.h").is_file():
        raise MachineError(
            f"Triton needs the headers of this Python to launch its kernels, and {headers} has no "
            f"Python.h: install them (on Debian and Ubuntu: apt install python3-dev), {_OR_CPU}"
        )
