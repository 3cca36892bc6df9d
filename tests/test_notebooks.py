"""Notebooks run from top to bottom without torch, and say what their numbers say."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = ROOT / "notebooks" / "00_one_graph_two_clocks.ipynb"

# What the first notebook's conclusion claims, in its own variables.
CLAIMS = """
assert best == 0.6 and round(gain, 1) == 1.7
assert (table.binds[table.index <= 0.5] == "resource h2d").all()
assert (table.binds[table.index >= 0.6] == "chain").all()
share = by_op.share[("CPU", "attn_cpu")]
assert 0.75 < share < 0.85, share
reached = (table["tokens/s"] / table["bound"]).round(2)
assert reached.idxmin() == 0.6 and reached.min() == 0.89, reached
assert 0.90 <= reached.drop(0.6).min() and reached.max() == 0.97, reached
gained = helps / helps["as it is"]
assert gained["link x 2"] < 1.01 and gained["slots x 2"] < 1.01, gained
assert 1.45 < gained["CPU attention x 2"] < 1.55, gained
import sys
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def printed(notebook) -> str:
    return "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )


@pytest.fixture(scope="module")
def first_run():
    notebook = nbformat.read(FIRST, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CLAIMS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        start = time.perf_counter()
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook, time.perf_counter() - start


def test_it_runs_and_its_conclusion_holds(first_run):
    notebook, _ = first_run
    assert "best ω of those tried" in printed(notebook)


def test_it_is_quick(first_run):
    assert first_run[1] < 90  # 10 s on an idle laptop; the machine may be busy


def test_the_saved_outputs_are_those_of_this_code(first_run):
    saved, fresh = printed(nbformat.read(FIRST, as_version=4)), printed(first_run[0])
    verdict = [line for line in fresh.splitlines() if "bound" in line or "best" in line]
    assert len(verdict) == 2
    assert [line for line in verdict if line not in saved] == [], "jupyter execute --inplace it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_saved_as_run_from_the_top(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell.outputs]
    assert "error" not in kinds
    streams = {o["name"] for cell in code for o in cell.outputs if o["output_type"] == "stream"}
    assert streams <= {"stdout"}
    assert path.stat().st_size < 500_000
