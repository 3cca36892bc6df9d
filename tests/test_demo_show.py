"""``moegen demo``: what it leaves, that it all belongs together, and what it never touches."""

from __future__ import annotations

import csv
import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moegen as mg
from moegen.cli import main
from moegen.demo import show
from moegen.demo.results import FILES, results, write_summary, writing
from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import read_requests
from moegen.units import MIB

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint as small as can be, with its own tokenizer and a dense model's texts."""
    return tmp_path_factory.mktemp("demo") / "moe"


@pytest.fixture(scope="module")
def dense():
    """A Llama of two layers that talks nonsense, and a tokenizer of characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(["<s>", "</s>", "<unk>", *map(chr, range(32, 127)), "\n"])}
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=4096,  # or all weights would find room beside the KV slots
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.3,  # wide apart logits: no two tokens are nearly equal
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture
def small(monkeypatch, dense, source):
    """``moegen demo`` on that checkpoint, in a GPU memory that holds only a part of it."""
    make = show.make_checkpoint
    monkeypatch.setattr(show, "make_checkpoint", lambda *a, **k: make(*a, **k, dense=dense))
    monkeypatch.setattr(show, "GPU_MEMORY_BYTES", 20 * MIB)


def _demo(capsys, *flags: object, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--device", "cpu", *map(str, flags)])
    said = capsys.readouterr()
    assert (exit_.value.code or 0) == code, said.err
    return said.out, said.err


def test_the_folder_holds_all_and_all_belongs_together(small, source, tmp_path, capsys):
    from matplotlib.image import imread

    folder = tmp_path / "shown"
    out, err = _demo(capsys, "--folder", folder, "--checkpoint", source, "--json")
    assert f"Making the demo checkpoint in {source}: there is none yet" in err
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["shown"]
    summary = json.loads((folder / "summary.json").read_text())
    assert {"format": "moegen.demo/1", **json.loads(out)} == summary

    requests = read_requests(show.PROMPTS)
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [row["id"] for row in answers] == [r.id for r in requests]
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in answers)
    assert summary["texts_equal"] == summary["served"] == len(requests)
    assert summary["texts_differing"] == []

    predicted = mg.Timeline.load(folder / "predicted.json")
    measured = mg.Timeline.load(folder / "measured.json")
    assert (predicted.source, measured.source) == ("simulated", "measured")
    assert predicted.graph.structure_hash == measured.graph.structure_hash
    assert predicted.graph.shape in measured.shapes
    assert measured.graph.strategy is not None
    assert measured.graph.strategy.to_dict() == summary["plan"]["decode"]
    step = summary["decode_step"]
    assert "copy_expert" in [row["op"] for row in step["by_op"]]  # weights did stream
    assert step == mg.compare(predicted, measured).to_dict()
    assert summary["decode_step_rows"] == sum(n > 0 for n in predicted.graph.shape.new)

    with (folder / "by_operation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == [row["op"] for row in step["by_op"]]
    for row, wanted in zip(rows, step["by_op"], strict=True):
        assert math.isclose(float(row["measured_s"]), wanted["measured_s"])

    with (folder / "throughput_vs_omega.csv").open() as file:
        points = list(csv.DictReader(file))
    of = {
        source: {float(p["omega"]): p for p in points if p["source"] == source}
        for source in ("predicted", "measured")
    }
    chosen = summary["plan"]["decode"]["omega"]
    assert set(of["measured"]) == {0.0, 0.25, 0.5, 0.75, 1.0, chosen}
    assert set(of["measured"]) < set(of["predicted"]) and len(of["predicted"]) >= 21
    for p in of["predicted"].values():
        assert float(p["period_s"]) >= 0.999 * float(p["bound_s"])

    for name in ("throughput_vs_omega.png", "gantt.png"):
        picture = imread(folder / name)
        assert min(picture.shape[:2]) > 300
        assert picture[..., :3].std() > 0.05  # something is drawn
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {1, 2}
    report = (folder / "report.txt").read_text()
    assert all(name in report for name in FILES)


def test_a_second_time_replaces_the_first_and_ends_with_three_lines(
    small, source, tmp_path, capsys
):
    folder = tmp_path / "shown"
    folder.mkdir()
    write_summary(folder, {})
    out, err = _demo(capsys, "--folder", folder, "--checkpoint", source)
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert (folder / "report.txt").read_text() == out
    lines = out.splitlines()
    assert [line[:3] for line in lines[-3:]] == ["1. ", "2. ", "3. "]
    assert "36 of 36 prompts answered" in lines[-3]
    assert "36 of 36 texts equal those of the dense model" in lines[-3]
    assert f"In {folder}:" in lines


def test_a_text_that_differs_is_named_and_exits_1(small, source, tmp_path, capsys, monkeypatch):
    texts = show._texts
    wrong = {"p03": "something else"}
    monkeypatch.setattr(
        show, "_texts", lambda path: texts(path) | (wrong if path.parent == source else {})
    )
    monkeypatch.setattr(show, "over_omega", _two_points)
    folder = tmp_path / "shown"
    out, _ = _demo(capsys, "--folder", folder, "--checkpoint", source, code=1)
    assert "35 of 36 texts equal those of the dense model" in out and "(not: p03)" in out
    assert json.loads((folder / "summary.json").read_text())["texts_differing"] == ["p03"]


def _two_points(engine, plan, work, lengths):
    """A curve without its measurements, which take time."""
    import pandas as pd

    point = {"omega": plan.decode.omega, "decode_tokens_per_s": 1.0, "binds": "chain"}
    return pd.DataFrame([point | {"source": name} for name in ("predicted", "measured")])


def _curve(predicted, measured, binds="lane GPU"):
    import pandas as pd

    rows = [
        {"omega": omega, "source": source, "decode_tokens_per_s": speed, "binds": binds}
        for source, speeds in (("predicted", predicted), ("measured", measured))
        for omega, speed in speeds.items()
    ]
    return pd.DataFrame(rows)


FLAT = ({0: 90.0, 0.5: 84.9, 1: 89.0}, {0: 66.0, 0.5: 60.0, 1: 65.0})


@pytest.mark.parametrize(
    ("curve", "on_gpu", "matters"),
    [
        (_curve(*FLAT), False, False),
        (_curve(*FLAT), True, True),  # there is a link
        (_curve(*FLAT, binds="lane BULK"), False, True),  # copies bind all the same
        (_curve({0: 90.0, 0.5: 60.0}, FLAT[1]), False, True),
        (_curve(FLAT[0], {0: 66.0, 0.5: 44.0}), False, True),
        (_curve({0.5: 90.0}, {0.5: 66.0}), False, True),  # nothing to compare
    ],
)
def test_the_last_line_says_where_omega_hardly_matters(curve, on_gpu, matters):
    from moegen.cli import story

    decode = SimpleNamespace(omega=0.5)
    report = SimpleNamespace(
        on_gpu=on_gpu, resolved=SimpleNamespace(plan=SimpleNamespace(decode=decode))
    )
    shown: Any = SimpleNamespace(
        report=report,
        curve=curve,
        bound=SimpleNamespace(seconds=0.2, binds="lane GPU"),
        comparison=SimpleNamespace(measured_period_s=0.3),
    )
    line = story._bound(shown)
    assert "The plan took ω = 0.5 " in line and ("matters little" not in line) == matters
    if not matters:
        assert "is 6% above the worst by prediction, 10% measured. Without a GPU nothing " in line


def test_what_is_not_a_demos_is_left_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(show, "make_checkpoint", lambda *_, **__: pytest.fail("work was begun"))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("42")
    _, err = _demo(capsys, "--folder", folder, code=2)
    assert f"{folder} holds thesis.tex, which is not of a demonstration" in err
    (folder / "thesis.tex").unlink()
    (folder / "summary.json").write_text('{"format": "another program\'s"}')
    _, err = _demo(capsys, "--folder", folder, code=2)
    assert "summary.json is not of a demonstration" in err
    (folder / "summary.json").rename(folder / "answers.jsonl")
    _, err = _demo(capsys, "--folder", folder, code=2)
    assert "cannot read the summary of a former demonstration" in err
    assert [path.name for path in folder.iterdir()] == ["answers.jsonl"]
    _, err = _demo(capsys, "--folder", folder / "answers.jsonl", code=2)
    assert "is no folder" in err
    _, err = _demo(capsys, "--folder", tmp_path / "missing" / "shown", code=2)
    assert f"{tmp_path / 'missing'} is no folder" in err


def test_a_failure_leaves_the_former_results(tmp_path):
    folder = tmp_path / "shown"
    with results(folder) as place:
        write_summary(place, {"run": 1})
    with pytest.raises(MachineError, match="No space left"), results(folder), writing(folder):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="not of the folder"), results(folder):
        raise OSError("not of the folder")
    with pytest.raises(KeyboardInterrupt), results(folder):
        raise KeyboardInterrupt
    assert json.loads((folder / "summary.json").read_text())["run"] == 1
    assert [path.name for path in folder.iterdir()] == ["summary.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["shown"]
    with pytest.raises(InvalidInput, match="holds notes.txt"), results(folder) as place:
        write_summary(place, {"run": 2})
        (folder / "notes.txt").write_text("mine")  # someone else writes there meanwhile
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_they_are_put_there_leaves_the_former_results(
    tmp_path, monkeypatch, former, fault
):
    folder, rename = tmp_path / "shown", Path.rename
    if former:
        with results(folder) as place:
            write_summary(place, {"run": 1})

    def failing(self, target):
        if self.name == "new":
            raise fault
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    wanted = MachineError if isinstance(fault, OSError) else KeyboardInterrupt
    with pytest.raises(wanted, match="No space" if wanted is MachineError else None):
        with results(folder) as place:
            write_summary(place, {"run": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["shown"] * former
    if former:
        assert json.loads((folder / "summary.json").read_text())["run"] == 1


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_that_nothing_changed(tmp_path, capsys, monkeypatch, sent, code):
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(sent)

    monkeypatch.setattr(show, "make_checkpoint", interrupted)
    folder = tmp_path / "shown"
    # Where the tests run in the background of a shell they were begun without one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _, err = _demo(capsys, "--folder", folder, code=code)
    finally:
        signal.signal(signal.SIGINT, before)
    assert f"stopped. {folder} is as it was before." in err
    assert list(tmp_path.iterdir()) == []


def test_prompts_are_some_dozens_of_mixed_length_and_kind():
    requests = read_requests(show.PROMPTS)
    assert len(requests) == 36
    assert {r.messages is None for r in requests} == {True, False}
    words = [len((r.prompt or r.messages[-1]["content"]).split()) for r in requests]
    assert min(words) < 5 and max(words) > 150
    assert all(r.max_tokens is not None for r in requests)
