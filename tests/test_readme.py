"""The README says only what is there: its Python runs, its commands and paths exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib

import matplotlib
import pytest
from fake_plan import Calls

from moegen.cli import main
from moegen.graph.hf_files import catalogue
from tests.documents import COMMANDS, ROOT, Document, all_options, parse

matplotlib.use("agg")

README = Document("README.md")


def test_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = README.code("python")
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out
    tokens, bound = map(int, re.search(r"(\d+) tokens/s, bound (\d+)", said).groups())
    assert 0 < tokens <= bound
    assert (tmp_path / "decode.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_sweeps_run(monkeypatch):
    import moegen as mg
    from moegen.sim import sweep

    monkeypatch.setattr(sweep, "plan", Calls([]).plan)  # the sweeps, not the plans, are shown
    names = {
        "mg": mg,
        "model": mg.ModelSpec.from_pretrained("mixtral-8x7b"),
        "hw": mg.HardwareSpec.from_name("c2"),
        "work": mg.Workload.uniform(n=8500, prompt_len=512, gen_len=256),
    }
    (code,) = README.code("py")
    exec(compile(code, "README.md", "exec"), names)
    assert names["df"]["hw"].tolist() == ["workstation-5090", "server-l40s", "server-h100"]
    assert names["df"]["tokens_per_usd"].notna().all()


@pytest.mark.parametrize("line", README.moegen)
def test_commands_and_their_options_exist(line):
    parse(line)


WHAT_IF = ("inspect", "memory", "plan", "simulate", "sweep")


@pytest.mark.parametrize("line", [x for x in README.moegen if x.split()[1] in WHAT_IF])
def test_commands_that_need_no_checkpoint_run(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split(line)[1:])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    assert said.out


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_what_is_tried_in_a_clone_leaves_nothing_to_commit(name):
    """Files and folders that commands and Python name, when they are run where they are read."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone")
    document = Document(name)
    code = "\n".join(document.shell + document.code("python") + document.code("py"))
    names = set(re.findall(r"(?<![\w/.-])[\w-]+\.(?:jsonl?|png|csv)\b", code))
    names |= set(re.findall(r"--folder ([\w-]+)", code))
    assert names >= (
        {"real.json", "answers.jsonl", "my-demo"} if name == "README.md" else {"t.json"}
    )
    names |= {f"{x}.partial" for x in names if x.endswith("answers.jsonl")}
    paths = [f"{x}/a" if "." not in x else x for x in sorted(names)]
    ignored = subprocess.run(
        ["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ignored.stdout.splitlines() == paths


def test_every_command_is_shown():
    assert {line.split()[1] for line in README.moegen} == set(COMMANDS)


def test_it_is_short():
    code, shell = README.code("python"), README.code("sh")
    assert len(code[0].strip().splitlines()) <= 13
    assert [len(text.splitlines()) for text in shell][0] == 2
    assert sum(len(text.splitlines()) for text in shell) <= 13
    assert len(re.findall(r"!\[", README.text)) == 1


def test_options_named_in_the_text_exist():
    assert README.options <= all_options()


def test_the_line_of_an_answer_is_one():
    (text,) = [x for x in README.code("") if x.startswith("{")]
    keys = ["id", "text", "prompt_tokens", "completion_tokens", "finish_reason"]
    assert list(json.loads(text)) == keys
    (said,) = [x for x in README.shell if x.startswith("echo ")]
    request = json.loads(shlex.split(said)[1])
    assert request["id"] == json.loads(text)["id"]
    assert request["max_tokens"] == json.loads(text)["completion_tokens"]


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert README.make_targets == {"demo", "test"} <= targets


def test_the_python_that_is_asked_for_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = re.findall(r"Python (\d\.\d+) or newer", README.prose)
    assert project["requires-python"] == f">={version}"


def test_the_layout_is_that_of_the_package():
    (layout,) = [x for x in README.code("") if x.startswith("moegen/")]
    paths = [line.split()[0] for line in layout.splitlines()]
    assert [p for p in paths if not (ROOT / p).exists()] == []
    there = {
        f"moegen/{path.name}{'/' if path.is_dir() else ''}"
        for path in (ROOT / "moegen").iterdir()
        if path.name not in ("__init__.py", "__main__.py", "__pycache__", "py.typed")
    }
    assert {p for p in paths if p.startswith("moegen/")} == there


def test_links_and_paths_exist():
    assert README.broken_links() == []
    paths = re.findall(r"`((?:docs|benchmarks|notebooks|moegen)/[^`]*)`", README.prose)
    assert paths and [p for p in paths if not (ROOT / p).exists()] == []


def test_measured_numbers_are_those_of_the_report():
    (said,) = re.findall(r"What was measured is in .*", README.text)
    report = (ROOT / "benchmarks/h200/REPORT.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\d+\.\d+%", said)
    assert len(numbers) == 2
    table = report.partition("## Decode against the bound")[2].partition("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    (column,) = {row.index(c) for row in rows for c in ("share", "share of the bound") if c in row}
    shares = [row[column] for row in rows if "%" in "".join(row[column:])]
    assert numbers == [min(shares, key=_percent), max(shares, key=_percent)]
    assert "4 layers of mixtral-8x7b at true width, random weights" in table
    # Nothing else that was measured is named but of the whole model.
    whole = report.partition("## Against the peers, the whole model")[2].partition("## ")[0]
    assert "all 32 layers" in whole and "1,053 tokens/s" in whole and "1,053 tokens" in said
    assert "under 24.00 GiB of GPU memory" in report and "under 24 GiB of GPU memory" in said
    assert "Decode of all 32 layers, the same widths, cap and kind of machine" in whole


def _percent(text: str) -> float:
    return float(text.removesuffix("%"))


def models_in_the_row(title: str) -> set[str]:
    row = re.search(rf"^\| {title} \| (.*) \|$", README.prose, re.MULTILINE)
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
        assert f"`{family}`" in README.prose


def test_machines_named_are_in_the_catalogue():
    from moegen.graph import hardware

    (said,) = re.findall(r"Machines in the catalogue: (.*?)\. ", README.prose)
    names = re.findall(r"\b(?:c\d|h\d+|(?:server|workstation)-[\w-]+)", said)
    assert sorted(names) == hardware.catalogue()


@pytest.mark.parametrize("kind", ["gpu", "cpu", "memory", "link"])
def test_parts_named_are_in_the_catalogue(kind):
    from moegen.graph.hardware_parts import parts

    row = re.search(rf"^\| {kind} \| (?:.*: )?(.*) \|$", README.prose, re.MULTILINE | re.IGNORECASE)
    assert row is not None and row[1].split(", ") == parts(kind)
