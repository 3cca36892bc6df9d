"""The docs say only what is there: Python prints what is shown, commands and links exist."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import matplotlib
import pytest

from moegen.cli import main
from moegen.errors import InvalidInput
from moegen.graph.profile_table import CATALOGUE
from moegen.graph.requests import read_requests
from tests.documents import COMMANDS, ROOT, Document, all_options, parse
from tests.small_models import two_layers

matplotlib.use("agg")

DOCS = [Document(f"docs/{path.name}") for path in sorted((ROOT / "docs").glob("*.md"))]
INSTALL, QUICKSTART, CONCEPTS, TROUBLE = (
    next(d for d in DOCS if d.name == f"docs/{name}.md")
    for name in ("install", "quickstart", "concepts", "troubleshooting")
)
LINES = [(d.name, line) for d in DOCS for line in d.moegen]


def test_these_are_the_docs():
    assert {d.path.stem for d in DOCS} == {"install", "quickstart", "concepts", "troubleshooting"}


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line for _, line in LINES])
def test_commands_and_their_options_exist(name, line):
    parse(line)


WHAT_IF = ("inspect", "memory", "plan", "simulate", "sweep")
# Those that rest on the demo's checkpoint are held by tests/test_compare_executed.py.
NEEDED = ("--hw here", "demo-moe")
HELD = [
    line
    for _, line in LINES
    if line.split()[1] in WHAT_IF and not any(words in line for words in NEEDED)
]


@pytest.mark.parametrize("line", dict.fromkeys(HELD))
def test_commands_that_need_no_checkpoint_run(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(CATALOGUE / "h200.json", "here.json")  # what moegen profile would leave
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split(line)[1:])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    assert said.out


@pytest.mark.parametrize("document", DOCS, ids=lambda d: d.name)
def test_python_runs_and_prints_what_is_shown(document, tmp_path, monkeypatch):
    """A document's blocks are one session; text shows what the block before it printed."""
    from moegen.graph.hardware import HardwareSpec
    from moegen.sim.cost import CostModel
    from moegen.sim.engine import simulate

    monkeypatch.chdir(tmp_path)
    cost = CostModel.roofline(HardwareSpec.from_name("c2"))
    simulate(two_layers(), cost, steps=2).save("t.json")  # what moegen run --timeline would leave
    names: dict = {}
    printed = None
    for language, text in document.blocks:
        if language == "python":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(text, document.name, "exec"), names)
            printed = said.getvalue()
        elif language == "text":
            assert printed == text
            printed = None
    for name in re.findall(r'"(\w+\.(?:png|json))"', "".join(document.code("python"))):
        assert (tmp_path / name).stat().st_size > 1_000


@pytest.mark.parametrize("document", DOCS, ids=lambda d: d.name)
def test_links_options_and_targets_exist(document):
    assert document.broken_links() == []
    assert document.options <= all_options()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert document.make_targets <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert document.extras <= project["optional-dependencies"].keys()


def test_install_names_all_that_a_person_installs():
    assert {"demo", "test", "clean"} <= INSTALL.make_targets
    assert INSTALL.extras == {"run", "demo", "notebook"}
    for variable in re.findall(r"`make (?:\w+ )?([A-Z_]+)=", INSTALL.prose):
        assert re.search(rf"^{variable} \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_caches_are_where_they_are_said_to_be(monkeypatch):
    from moegen.cache import cache_folder

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == Path("~/.cache/moegen").expanduser()
    said = {path for d in DOCS for path in re.findall(r"~/\.cache/moegen[\w/-]*", d.text)}
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "moegen").rglob("*.py"))
    for path in said:
        for part in path.removeprefix("~/.cache/moegen").strip("/").split("/"):
            assert f'"{part}"' in source or not part


def test_example_requests_are_good(tmp_path):
    (text,) = QUICKSTART.code("json")
    (tmp_path / "in.jsonl").write_text(text, encoding="utf-8")
    requests = read_requests(tmp_path / "in.jsonl")
    answers = [json.loads(x) for x in _bare("{")[0].splitlines()]
    assert [a["id"] for a in answers] == [r.id for r in requests]
    for answer, request in zip(answers, requests, strict=True):
        served = ["id", "text", "prompt_tokens", "completion_tokens", "finish_reason"]
        assert list(answer) == (served if request.prompt != "" else ["id", "error"])


def _bare(begin: str) -> list[str]:
    return [text for text in QUICKSTART.code("") if text.startswith(begin)]


def test_the_demo_leaves_what_is_said():
    from moegen.demo.results import FILES
    from moegen.demo.show import PROMPTS

    section = QUICKSTART.prose.partition("## 0. The demo")[2].partition("\n## ")[0]
    files = set(re.findall(r"`(\w+\.(?:txt|jsonl|csv|png|json))`", section))
    assert files == set(FILES)
    folder = next(p.default for p in COMMANDS["demo"].params if "--folder" in p.opts)
    assert f"`{folder}`" in section and f"`{folder}`" in Document("README.md").prose
    assert len(read_requests(PROMPTS)) == 36 and "three dozen prompts" in Document("README.md").text


def test_exit_codes_are_those_of_the_errors():
    from moegen.errors import Infeasible, MachineError

    table = dict(re.findall(r"^\| (\d+) \| (.*) \|$", QUICKSTART.prose, re.MULTILINE))
    assert list(table) == ["0", "1", "2", "3", "130"] and "143" in table["130"]
    assert "fault of the machine" in table[str(MachineError.exit_code)]
    assert "wrong" in table[str(InvalidInput.exit_code)]
    assert "does not fit" in table[str(Infeasible.exit_code)]
    for code in (1, 2, 3):
        assert f"## Exit code {code}:" in TROUBLE.text


def test_every_knob_is_in_the_glossary():
    from dataclasses import fields

    from moegen.graph.strategy import Strategy

    rows = dict(re.findall(r"^\|.* \| `(\w+)`, `(--[\w-]+)` \|", CONCEPTS.prose, re.MULTILINE))
    assert rows == {f.name: f"--{f.name.replace('_', '-')}" for f in fields(Strategy)}


def test_lanes_and_edges_are_those_of_the_graph():
    from moegen.graph.task import EdgeKind, Lane

    first = re.findall(r"^\| `?([A-Z]{2,})`? \|", CONCEPTS.prose, re.MULTILINE)
    assert set(first) == {*map(str, Lane), *map(str, EdgeKind)}


def _sayings() -> list[str]:
    """Every text in the program; what is put into it shows as …"""
    found = []
    for path in (ROOT / "moegen").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
    return found


# torch and the system say these, not moegen.
FOREIGN = {"No space left on device", "CUDA out of memory"}


def test_messages_are_those_of_the_program():
    rows = re.findall(r"^\| (`[^|]*`) \|", TROUBLE.prose, re.MULTILINE)
    messages = [m for row in rows for m in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 25
    sayings = _sayings()
    unknown = []
    for message in messages:
        pieces = [p.strip(" :.") for p in re.split("…", message)]
        for piece in (p for p in pieces if len(p) > 3 and p not in FOREIGN):
            if not piece.startswith("IN.jsonl") and not any(piece in s for s in sayings):
                unknown.append(piece)
    assert unknown == []


def test_pictures_come_from_the_script():
    import importlib.util

    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    shown = set()
    for name in ("README.md", *(d.name for d in DOCS)):
        shown |= {Path(p).name for p in re.findall(r"!\[[^]]*\]\(([^)]+)\)", Document(name).text)}
    drawn = {f"{name}.png" for name in pictures.PICTURES}
    assert shown == drawn == {p.name for p in (ROOT / "docs/img").iterdir()}
    curve = pictures.throughput_vs_omega(points=3)
    assert curve["decode_tokens_per_s"].idxmax() == 1  # the best is neither end


@pytest.mark.cpu
def test_python_for_a_checkpoint_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    import moegen as mg
    from tests.tiny import give_tokenizer, tiny_mixtral

    monkeypatch.chdir(tmp_path)
    give_tokenizer(tiny_mixtral(tmp_path / "path/to/checkpoint", num_hidden_layers=1)[0])
    with mg.Engine.from_pretrained("path/to/checkpoint", device="cpu") as engine:
        engine.generate(["Hello"], max_new_tokens=6)
        names = {"mg": mg, "measured": engine.timelines[-1]}
    blocks = QUICKSTART.code("py")
    assert len(blocks) == 2
    for text in blocks:
        exec(compile(text, "docs/quickstart.md", "exec"), names)
    said = capsys.readouterr().out
    assert "attn_gpu" in said or "attn_cpu" in said
    assert "length" in said or "stop" in said


@pytest.mark.cpu
def test_a_run_says_what_is_shown(tmp_path, monkeypatch, capsys):
    """The labels of the sample output are those of a real run, in their order."""
    pytest.importorskip("torch")
    from tests.tiny import give_tokenizer, tiny_mixtral

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))  # a busy machine is a line more
    give_tokenizer(tiny_mixtral(tmp_path / "model", num_hidden_layers=1)[0])
    rows = [{"id": 1, "prompt": "The capital"}, {"id": 2, "prompt": ""}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split("run --model model --input in.jsonl --output out.jsonl --device cpu"))
    assert exit_.value.code == 0
    said = capsys.readouterr().err.splitlines()
    opening, closing = _bare("Device")[0].splitlines(), _bare("2 of 3")[0].splitlines()
    begin = next(i for i, x in enumerate(said) if x.startswith("Device"))
    end = next(i for i, x in enumerate(said) if "rows answered" in x)
    assert _labels(said[begin : begin + len(opening)]) == _labels(opening)
    assert _labels(said[end + 1 :]) == _labels(closing[1:])
    assert re.sub(r"[\d.]+", "0", closing[0].split(":")[0]) == re.sub(
        r"[\d.]+", "0", said[end].split(":")[0]
    )


def _labels(lines: list[str]) -> list[str]:
    return [" ".join(line.split()[:1]) for line in lines]


def test_all_commands_are_shown_somewhere():
    assert {line.split()[1] for _, line in LINES} | {"demo"} == set(COMMANDS)
