"""The package as a whole: what importing it loads, and its public names."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import moegen as mg

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "safetensors", "pandas", "matplotlib", "scipy", "simpy"}
PUBLIC = sorted(mg.__all__)
NEED_TORCH = ("Engine", "profile")


def run_fresh(code: str) -> str:
    """Run ``code`` in a new interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    loaded = run_fresh("import moegen, sys; print(*sys.modules)").split()
    assert "moegen" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_import_is_instant() -> None:
    code = """
        import time
        start = time.perf_counter()
        import moegen
        print(time.perf_counter() - start)
    """
    assert min(float(run_fresh(code)) for _ in range(3)) < 0.2


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in NEED_TORCH])
def test_public_name_resolves(name: str) -> None:
    assert getattr(mg, name) is not None


@pytest.mark.cpu
@pytest.mark.parametrize("name", NEED_TORCH)
def test_what_runs_resolves(name: str) -> None:
    assert getattr(mg, name).__module__ == mg._HOME[name]


def test_planning_and_simulating_load_no_torch() -> None:
    code = f"""
        import moegen, sys
        for name in moegen.__all__:
            if name not in {NEED_TORCH}:
                getattr(moegen, name)
        print(*sys.modules)
    """
    assert {"torch", "transformers"}.isdisjoint(run_fresh(code).split())


def test_memory_is_the_function_even_after_its_module_was_imported() -> None:
    code = """
        import moegen.graph.memory, moegen.graph.build, moegen
        print(callable(moegen.memory), callable(moegen.build))
    """
    assert run_fresh(code).split() == ["True", "True"]


def test_no_module_takes_the_place_of_a_public_name() -> None:
    # `import moegen.NAME` would set it on the package, over the function.
    beside = {path.stem for path in (ROOT / "moegen").iterdir()}
    assert beside & set(mg.__all__) == {"plot"}


@pytest.mark.parametrize("name", NEED_TORCH)
def test_a_missing_extra_is_named_with_its_remedy(name: str) -> None:
    code = f"""
        import sys
        sys.modules["torch"] = None  # as if it were not installed
        import moegen
        try:
            moegen.{name}
        except ModuleNotFoundError as error:
            print(error)
    """
    said = run_fresh(code)
    assert f"moegen.{name} needs torch" in said
    assert "pip install 'moegen[run]'" in said


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mg.nonsense  # noqa: B018


def test_dir_shows_every_public_name() -> None:
    shown = run_fresh("import moegen; print(*dir(moegen))").split()
    assert {*PUBLIC, "__version__"} <= set(shown)


def test_type_checkers_see_the_homes_that_run() -> None:
    tree = ast.parse((ROOT / "moegen" / "__init__.py").read_text(encoding="utf-8"))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    del seen["ModuleType"]
    assert seen == mg._HOME | {"plot": "moegen"}
    assert sorted(seen) == PUBLIC


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert mg.__version__ == project["version"]
