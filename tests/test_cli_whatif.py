"""Commands that plan: ``inspect``, ``memory``, ``plan``, ``simulate``; their flags and errors."""

from __future__ import annotations

import json

import pytest
from fake_engine import FakeTokenizer

import moegen as mg
from moegen.cli import main


def _line(id, prompt="abc", **more):
    return json.dumps({"id": id, "prompt": prompt, **more})


def test_version(monkeypatch, capsys):
    monkeypatch.setitem(mg.__dict__, "__version__", "1.2.3")
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0 and capsys.readouterr().out == "moegen 1.2.3\n"


def _main(capsys, line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def test_inspect_memory_and_simulate_call_the_python_api(tmp_path, capsys):
    code, out, _ = _main(capsys, "inspect mixtral-8x7b --json")
    assert code == 0 and json.loads(out)["kv_bytes_per_token"] == 131072

    code, out, _ = _main(capsys, "memory mixtral-8x7b --hw c2 --B 3640 --b-a 64 --json")
    assert code == 0 and json.loads(out)["fits"]
    code, out, err = _main(capsys, "memory mixtral-8x7b --hw c2 --B 9000 --b-a 64 --json")
    assert code == 3 and not json.loads(out)["fits"] and "host memory" in err

    point = "mixtral-8x7b --hw c2 --B 512 --b-a 64 --omega 0.5"
    trace = tmp_path / "trace.json"
    code, out, _ = _main(capsys, f"simulate {point} --steps 2 --trace {trace} --json")
    result = json.loads(out)
    assert code == 0 and result["period_s"] >= result["bound_s"] > 0
    assert json.loads(trace.read_text())["traceEvents"]


POINT = "mixtral-8x7b --hw c2 --B 512 --b-a 64"


@pytest.mark.parametrize("command", ["memory", "simulate"])
def test_a_preset_is_the_workload_of_its_lengths(capsys, command):
    _, named, _ = _main(capsys, f"{command} {POINT} --workload mmlu --json")
    _, spelt, _ = _main(capsys, f"{command} {POINT} --n 116000 --prompt-len 512 --gen-len 1 --json")
    _, other, _ = _main(capsys, f"{command} {POINT} --json")
    assert json.loads(named) == json.loads(spelt) != json.loads(other)


@pytest.mark.parametrize("command", ["memory", "simulate"])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (f"{POINT} --workload mmlu --n 5", "mmlu says that already: drop --n"),
        (f"{POINT} --workload mmlu --gen-len 5", "mmlu says that already: drop --gen-len"),
        (f"{POINT} --workload mlu", "'mlu' is no file, and none of the presets chatbot-arena, "),
        (f"{POINT} --workload {__file__}", "mixtral-8x7b is no folder"),
        (f"{POINT} --schedule flexgen", "--schedule: 'flexgen' is not there yet; known: module"),
        ("mixtral-8x7b --hw c2 --omega 1", "--B is missing"),
    ],
)
def test_wrong_points_are_refused(capsys, command, flags, reason):
    code, out, err = _main(capsys, f"{command} {flags}")
    assert (code, out) == (2, "") and reason in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--trace nodir/t.json", "--trace: nodir is no folder: make it first"),
        ("--trace .", "--trace: . is a folder"),
        ("--hw c4", "'c4' is no file, and none of c1, c2, c3, h200"),
        ("--hw c4", "--hw rtx-4090+epyc-9354+384GB"),
        ("--hw rtx-4090+epyc-9354", "--hw: 'rtx-4090+epyc-9354' names no machine by its parts"),
        ("--hw rtx-4090", "--hw: 'rtx-4090' is a GPU, and a machine has a CPU"),
        ("--hw rtx-4091+epyc-9354+1TB", "--hw: 'rtx-4091' is no GPU of the catalogue"),
        ("--hw c4", "--hw FILE.yaml: a copy of "),
        ("--hw none.yaml", "none.yaml cannot be read: No such file or directory\n"),
    ],
)
def test_places_and_machines_are_checked_before_any_work(capsys, monkeypatch, flags, reason):
    def work(*_, **__):
        raise AssertionError("work was done")

    monkeypatch.setattr(mg, "simulate", work, raising=False)
    code, out, err = _main(capsys, f"simulate {POINT} {flags}")
    assert (code, out) == (2, "") and reason in err and "from_yaml" not in err
    assert "Errno" not in err


@pytest.mark.parametrize("command", ["memory", "simulate"])
def test_more_rows_in_flight_than_the_workload_has_are_taken_as_all(capsys, command):
    point = f"{command} mixtral-8x7b --hw c2 --n 4 --json"
    code, many, err = _main(capsys, f"{point} --B 100")
    assert code == 0 and err == (
        "moegen: warning: --B 100 is more than there are rows: taken as 4\n"
    )
    code, four, err = _main(capsys, f"{point} --B 4")
    assert code == 0 and err == "" and many == four


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("--B 9000", "Try a smaller --B"),
        ("--B 3640 --b-a 2048 --kv-slots 4", "Try a smaller --b-a or fewer --kv-slots"),
        ("--B 512 --s-params 30GB", "Try a smaller --s-params"),
        ("--B 512 --s-expert 30GB", "Try a smaller --s-expert or --expert-group"),
    ],
)
def test_advice_names_flags(capsys, flags, advice):
    code, _, err = _main(capsys, f"memory mixtral-8x7b --hw c2 {flags} --n 10000 --json")
    assert code == 3 and err.endswith(f"{advice}\n")


def test_fields_and_flags_are_the_same():
    from dataclasses import fields

    from moegen.cli.groups import _STRATEGY_FLAGS

    assert list(_STRATEGY_FLAGS) == [field.name for field in fields(mg.Strategy)]


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration alone."""
    (tmp_path / "config.json").write_text(
        json.dumps(mg.ModelSpec.from_pretrained("mixtral-8x7b").hf)
    )
    return tmp_path


@pytest.mark.cpu
def test_a_file_is_counted_with_the_models_tokenizer(folder, capsys, monkeypatch):
    pytest.importorskip("transformers")
    file = folder / "in.jsonl"
    lines = [_line(1, "x" * 100, max_tokens=7), _line(2, "x" * 300), _line(3, "x" * 500)]
    file.write_text("\n".join(lines))
    point = f"{folder} --hw c2 --B 3 --workload {file}"
    code, out, err = _main(capsys, f"memory {point}")
    assert (code, out) == (2, "") and f"tokenizer, and {folder} has none" in err

    monkeypatch.setattr("moegen.exec.loading.load_tokenizer", lambda _: FakeTokenizer())
    wanted = mg.Workload(((100, 7, 1), (300, 20, 1), (500, 20, 1)))
    model, hw = mg.ModelSpec.from_pretrained(folder), mg.HardwareSpec.from_name("c2")
    ledger = mg.memory(model, hw, mg.Strategy(B=3, b_a=3, b_e=8192), wanted)
    code, out, _ = _main(capsys, f"memory {point} --gen-len 20 --json")
    assert code == 0 and json.loads(out) == ledger.to_dict()

    # The mean row: 300 tokens and half of 47/3.
    code, out, _ = _main(capsys, f"simulate {point} --gen-len 20 --json")
    uniform = f"simulate {folder} --hw c2 --B 3 --n 3 --prompt-len 300 --gen-len 15 --json"
    assert code == 0 and json.loads(out) == json.loads(_main(capsys, uniform)[1])

    # What `moegen run` answers with an error is left out.
    much = _line(5, "x" * 40_000)
    file.write_text("\n".join([_line(0, ""), *lines, much]))
    code, out, err = _main(capsys, f"memory {point} --gen-len 20 --json")
    assert code == 0 and json.loads(out) == ledger.to_dict()
    assert err == (
        "moegen: warning: 2 of 5 rows cannot be served and are left out, the first, id 0: "
        "the prompt is empty\n"
    )
    file.write_text(_line(1, ""))
    code, _, err = _main(capsys, f"memory {point}")
    assert code == 2 and "no row can be served, the first, id 1: the prompt is empty" in err


def test_plan_says_what_the_python_api_says(capsys):
    code, out, _ = _main(capsys, "plan mixtral-8x7b --hw c2 --n 600 --omega 0.3 --json")
    found = json.loads(out)
    model, hw = mg.ModelSpec.from_pretrained("mixtral-8x7b"), mg.HardwareSpec.from_name("c2")
    work = mg.Workload.uniform(n=600, prompt_len=512, gen_len=256)
    plan = mg.plan(model, hw, work, omega=0.3)
    gains = json.loads(json.dumps(plan.to_dict()))
    assert code == 0 and found["plan"] == {x: gains.pop(x) for x in ("prefill", "decode")}
    assert {name: found[name] for name in gains} == gains
    assert found["time_s"] == pytest.approx(sum(found[f"{x}_s"] for x in ("prefill", "decode")))
    for phase in ("prefill", "decode"):
        ledger = mg.memory(model, hw, getattr(plan, phase), work, phase=phase, batch=600)
        assert found["memory"][phase] == ledger.to_dict()


def test_of_this_machine_some_memory_is_left_free(capsys, monkeypatch):
    here = mg.HardwareSpec.from_name("c2").with_(name="this very machine")
    monkeypatch.setattr(mg.HardwareSpec, "detect", classmethod(lambda _: here))
    shares = {"here": (0.97, 0.95), "c2": (1.0, 1.0)}
    for name, (gpu, host) in shares.items():
        code, out, _ = _main(capsys, f"plan mixtral-8x7b --hw {name} --n 4000 --B 3500 --json")
        ledger = json.loads(out)["memory"]["decode"]
        free = {x: ledger[x]["total_bytes"] / ledger[x]["capacity_bytes"] for x in ("gpu", "host")}
        assert code == 0 and gpu - 0.03 < free["gpu"] <= gpu and free["host"] <= host


def test_a_plan_in_words_can_be_copied_into_flags(capsys):
    point = "mixtral-8x7b --hw c2 --n 600"
    code, out, err = _main(capsys, f"plan {point}")
    assert code == 0 and err == ""
    (flags,) = [x.removeprefix("Flags") for x in out.splitlines() if x.startswith("Flags")]
    _, first, _ = _main(capsys, f"plan {point} --json")
    _, again, _ = _main(capsys, f"plan {point} --json {flags.strip()}")
    assert json.loads(again)["plan"]["decode"] == json.loads(first)["plan"]["decode"]
    assert "600 rows in flight" in out
    assert all(len(x) < 80 for x in out.splitlines() if not x.startswith("Flags"))


def test_a_plan_by_a_profile_says_whose_memory_it_counts_on(capsys, tmp_path):
    point = "plan mixtral-8x7b --profile h200 --n 300"
    code, out, _ = _main(capsys, point)
    said = " ".join(out.split())
    assert code == 0 and " on h200; what it lacks rests on rates. Memory is that machine's" in said
    more = mg.HardwareSpec.from_name("h200").with_(name="mine", host_memory_bytes=1e12)
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({k: v for k, v in more.to_dict().items() if k != "source"}))
    code, out, err = _main(capsys, f"{point} --hw {file}")
    assert code == 0, err
    assert "rests on rates. Memory is that of mine" in " ".join(out.split())


def test_simulate_speaks_in_words(capsys):
    code, out, _ = _main(capsys, f"simulate {POINT} --steps 2")
    first, busy, step = out.splitlines()
    assert code == 0 and first.startswith("mixtral-8x7b decode: 2 steps simulated, ")
    assert busy.startswith("  lanes are busy: GPU ") and busy.endswith("%")
    assert step.startswith("A decode step takes ") and "<" not in out


def test_a_plan_that_does_not_fit_exits_3(capsys):
    code, out, err = _main(capsys, "plan deepseek-v2 --hw c1")
    assert (code, out) == (3, "") and "does not fit host memory: needs " in err


def test_no_machine_is_this_one(capsys, monkeypatch):
    here = mg.HardwareSpec.from_name("c2").with_(name="this very machine")
    monkeypatch.setattr(mg.HardwareSpec, "detect", classmethod(lambda _: here))
    for flags in ("", "--hw here"):
        code, out, _ = _main(capsys, f"memory mixtral-8x7b --B 100 {flags}")
        assert code == 0 and "this very machine" in out


@pytest.mark.parametrize(
    ("model", "runs", "why"),
    [
        ("mixtral-8x7b", True, "family mixtral"),
        ("gpt-oss-20b", False, "family gpt_oss is not among those that run"),
    ],
)
@pytest.mark.cpu
def test_inspect_says_whether_a_model_runs(capsys, model, runs, why):
    pytest.importorskip("torch")
    code, out, _ = _main(capsys, f"inspect {model} --json")
    found = json.loads(out)
    assert code == 0 and found["runs"] is runs and why in found["why"]
    assert why in _main(capsys, f"inspect {model}")[1]


def test_inspect_shows_the_classes_of_layers(capsys):
    _, out, _ = _main(capsys, "inspect gpt-oss-20b --json")
    classes = {c["name"]: c for c in json.loads(out)["layer_classes"]}
    assert classes["moe_window"]["window"] == 128 and classes["moe"]["window"] is None
    assert {c["layers"] for c in classes.values()} == {12}
    assert (classes["moe"]["n_experts"], classes["moe"]["top_k"]) == (32, 4)
    _, text, _ = _main(capsys, "inspect gpt-oss-20b")
    assert "12 moe_window" in text and "32 experts of 12.62 MiB, 4 for each token" in text


def test_inspect_needs_no_torch(capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = _main(capsys, "inspect mixtral-8x7b --json")
    found = json.loads(out)
    assert code == 0 and not found["runs"] and "pip install 'moegen[run]'" in found["why"]
