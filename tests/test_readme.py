"""The README says only what is there: its Python runs, its commands and paths exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import typer.main

from moegen.cli import app
from moegen.graph.hf_files import catalogue
from moegen.graph.requests import read_requests

matplotlib.use("agg")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def shell_lines() -> list[str]:
    lines = "".join(blocks("sh")).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


MOEGEN = [line for line in shell_lines() if line.startswith("moegen ")]


def command_of(line: str):
    words = shlex.split(line, comments=True)
    return typer.main.get_command(app).commands[words[1]], words[2:]


def test_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, look = blocks("python")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    said = capsys.readouterr().out
    names["timeline"].save("t.json")
    exec(compile(look, "README.md", "exec"), {})
    assert (tmp_path / "step.png").exists() and (tmp_path / "trace.json").exists()
    assert "(0, 1, 2, 3)" in capsys.readouterr().out
    tokens, bound = map(int, re.search(r"(\d+) tokens/s, bound (\d+)", said).groups())
    assert 0 < tokens <= bound
    assert (tmp_path / "decode.png").stat().st_size > 10_000


@pytest.mark.parametrize("line", MOEGEN)
def test_commands_and_their_options_exist(line):
    command, arguments = command_of(line)
    context = command.make_context("moegen", list(arguments), resilient_parsing=False)
    assert context.command is command


@pytest.mark.parametrize("line", [x for x in MOEGEN if x.split()[1] not in ("run", "demo")])
def test_commands_that_need_no_checkpoint_run(line, tmp_path):
    words = [sys.executable, "-c", "from moegen.cli import main; main()", *shlex.split(line)[1:]]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_kind_of_line_is_there():
    assert {line.split()[1] for line in MOEGEN} == set(typer.main.get_command(app).commands)


def test_options_named_in_the_text_exist():
    known = {
        option
        for command in typer.main.get_command(app).commands.values()
        for parameter in command.params
        for option in parameter.opts
    }
    text = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`(--[A-Za-z-]+)[^`]*`", text))
    assert named and named <= known


def test_every_knob_is_in_the_glossary():
    from dataclasses import fields

    from moegen.graph.strategy import Strategy

    rows = dict(re.findall(r"^\|.* \| `(\w+)`, `(--[\w-]+)` \|", README, re.MULTILINE))
    assert rows == {f.name: f"--{f.name.replace('_', '-')}" for f in fields(Strategy)}


def test_the_line_of_an_answer_is_one():
    (text,) = [x for x in blocks("") if x.startswith("{")]
    keys = ["id", "text", "prompt_tokens", "completion_tokens", "finish_reason"]
    assert list(json.loads(text)) == keys


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z]+)", "\n".join(shell_lines()), re.MULTILINE))
    assert named == {"install", "test"} and named <= targets


def test_extras_exist():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set(re.findall(r"pip install '\.\[(\w+)\]'", README))
    assert named and named <= project["optional-dependencies"].keys()


def test_paths_of_the_layout_and_links_exist():
    (layout,) = [x for x in blocks("") if x.startswith("moegen/")]
    paths = [line.split()[0] for line in layout.splitlines()]
    paths += re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    paths += re.findall(r"`((?:docs|benchmarks|notebooks)/[^`]*)`", README)
    assert len(paths) > 12
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_measured_numbers_are_those_of_the_report():
    (said,) = re.findall(r"What was measured is in .*", README)
    report = (ROOT / "benchmarks/h200/REPORT.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\d+\.\d+%", said)
    assert len(numbers) == 2
    table = report.partition("## Decode against the bound")[2].partition("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    (column,) = {row.index(c) for row in rows for c in ("share", "share of the bound") if c in row}
    shares = [row[column] for row in rows if "%" in "".join(row[column:])]
    assert numbers == [min(shares, key=_percent), max(shares, key=_percent)]
    assert "4 layers of mixtral-8x7b at true width, random weights" in table


def _percent(text: str) -> float:
    return float(text.removesuffix("%"))


def test_example_requests_are_good(tmp_path):
    (text,) = blocks("json")
    (tmp_path / "requests.jsonl").write_text(text, encoding="utf-8")
    assert [r.id for r in read_requests(tmp_path / "requests.jsonl")] == ["paris", "chat"]


def models_in_the_row(title: str) -> set[str]:
    row = re.search(rf"^\| {title} \| (.*) \|$", README, re.MULTILINE)
    assert row is not None
    return set(row[1].split(", "))


def test_the_models_named_are_the_catalogue():
    runs, plans = models_in_the_row("runs and plans"), models_in_the_row("plans")
    assert runs | plans == set(catalogue()) and not runs & plans


@pytest.mark.cpu
def test_the_models_said_to_run_are_those_of_families_that_run():
    pytest.importorskip("torch")
    from moegen.exec.families import FAMILIES
    from moegen.graph.model import ModelSpec

    runs = {n for n in catalogue() if ModelSpec.from_pretrained(n).model_type in FAMILIES}
    assert models_in_the_row("runs and plans") == runs
    for family in FAMILIES:
        assert f"`{family}`" in README


def test_machines_named_are_in_the_catalogue():
    from moegen.graph import hardware

    (said,) = re.findall(r"Machines in the catalogue: (.*?)\. `", README)
    assert set(re.findall(r"\b(?:c\d|h\d+)\b", said)) == set(hardware.catalogue())
