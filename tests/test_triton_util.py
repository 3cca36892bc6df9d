"""What require_triton says of a machine that lacks something."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from moegen.errors import MachineError
from moegen.exec.kernels import triton_util
from moegen.exec.kernels.triton_util import require_triton

pytestmark = pytest.mark.cpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with Triton, gcc and Python's headers, below a folder that the test may change."""
    (tmp_path / "Python.h").touch()
    gcc = tmp_path / "gcc"
    gcc.touch(mode=0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_util, "find_spec", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    assert shutil.which("gcc") == str(gcc)
    return tmp_path


def test_a_complete_machine_passes(machine: Path) -> None:
    require_triton()


def test_without_triton(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="need Triton, which is not installed.*device='cpu'"):
        require_triton()


def test_without_a_compiler(machine: Path) -> None:
    (machine / "gcc").unlink()
    with pytest.raises(MachineError, match="C compiler.*neither gcc nor clang.*apt install gcc"):
        require_triton()


def test_clang_will_do(machine: Path) -> None:
    (machine / "gcc").rename(machine / "clang")
    require_triton()


def test_cc_that_names_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "nonsense-cc")  # Triton takes CC even where gcc is present
    with pytest.raises(MachineError, match="CC='nonsense-cc' names no program"):
        require_triton()


def test_without_headers(machine: Path) -> None:
    (machine / "Python.h").unlink()
    with pytest.raises(MachineError, match=r"has no Python\.h.*python3-dev"):
        require_triton()


def test_the_interpreter_needs_no_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "gcc").unlink()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    require_triton()
