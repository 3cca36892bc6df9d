"""``moegen profile``: the file that it writes, the commands that read it, and what it refuses."""

from __future__ import annotations

import json
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quick_profile import quicken  # noqa: E402
from small_models import MIXTRAL  # noqa: E402

import moegen as mg  # noqa: E402
from moegen.cli import main  # noqa: E402
from moegen.exec import table as table_module  # noqa: E402
from moegen.graph.profile_table import ProfileTable  # noqa: E402

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path):
    """A model's sizes, without weights."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(MIXTRAL))
    return tmp_path / "tiny"


@pytest.fixture
def quick(monkeypatch):
    quicken(monkeypatch)
    monkeypatch.setattr(table_module, "_REST_S", 10.0)  # of the ten seconds that it may take


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def measured(*_, **__):
        raise AssertionError("it should have been refused before")

    monkeypatch.setattr(table_module, "machine_profile", measured)


def run(capsys, *argv):
    with pytest.raises(SystemExit) as exit_:
        main([str(x) for x in argv])
    said = capsys.readouterr()
    return exit_.value.code or 0, said.out, said.err


def test_a_machine_is_measured_and_asked(folder, quick, tmp_path, capsys):
    file, real = tmp_path / "here.json", tmp_path / "real.json"
    code, out, err = run(
        capsys, "profile", folder, "--device", "cpu", "--seconds", 10, "-o", file, "--json"
    )
    assert code == 0, err
    table, said = ProfileTable.load(file), json.loads(out)
    assert said["output"] == str(file) and said["curves"] == len(table.curves) > 10
    # What there was no time for is said in words and in the result.
    assert "there was no time left for" in said["notes"][0]
    assert all(f"moegen: warning: {note}" in err for note in said["notes"])
    assert "  tiny, 2 layers" in err.splitlines()
    point = ("--B", 8, "--b-a", 2, "--omega", 0.5)
    job = (folder, "--n", 8, "--prompt-len", 16, "--gen-len", 8, "--profile", file, "--json")
    cost = mg.CostModel.from_profile(file, hw=table.machine)
    code, out, err = run(capsys, "plan", *job, *point)
    assert code == 0, err
    assert json.loads(out)["hardware"] == cost.hw.name
    plan_s = json.loads(out)["time_s"]
    code, out, err = run(capsys, "sweep", *job, *point)
    assert code == 0, err
    assert [p["time_s"] for p in json.loads(out)["points"]] == [plan_s]
    s = mg.Strategy(B=8, b_a=2, b_e=8192, omega=0.5)
    model = mg.ModelSpec.from_pretrained(folder)
    code, out, err = run(capsys, "simulate", *job[:1], *job[3:], *point)
    assert code == 0, err
    assert json.loads(out)["period_s"] > 0
    with mg.Engine.random(model, device="cpu", dtype="float32", hardware=cost.hw) as engine:
        engine.execute(mg.build(engine.model, s, kv_len=20), steps=4).save(real)
    code, out, err = run(capsys, "compare", real, "--profile", file, "--json")
    assert code == 0, err
    c = mg.compare(cost, mg.Timeline.load(real))
    assert json.loads(out)["predicted_period_s"] == c.predicted_period_s


def test_it_says_what_it_wrote(folder, quick, tmp_path, capsys):
    file = tmp_path / "here.json"
    file.write_text("of an earlier run")
    code, out, err = run(capsys, "profile", folder, "--device", "cpu", "-o", file, "--seconds", 10)
    table = ProfileTable.load(file)
    assert (code, out) == (0, "")
    assert f"{len(table.curves)} curves of CPU lanes (no GPU) and {table.machine.cpu_name}" in err
    assert err.splitlines()[-1] == f"written to {file}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("mixtral-9x9b -o {}/x.json", "'mixtral-9x9b' is no model"),
        ("gpt-oss-20b -o {}/x.json", "families that run are mixtral, deepseek_v2"),
        ("mixtral-8x7b qwen3-30b-a3b -o {}/x.json", "qwen3-30b-a3b: models of family 'qwen3_moe'"),
        ("-o {}", "--output: {} is a folder: name a file in it"),
        ("-o {}/nowhere/x.json", "--output: {}/nowhere is no folder: make it first"),
        ("-o {}/x.json --seconds 9", "--seconds"),
        ("-o {}/x.json --seconds nan", "--seconds"),
        ("-o {}/x.json --seconds soon", "--seconds"),
        ("-o {}/x.json --dtype fp8", "--dtype"),
        ("-o {}/x.json --device tpu", "--device"),
        ("mixtral-8x7b", "--output"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(nothing_is_measured, tmp_path, capsys, words, says):
    device = () if "--device" in words else ("--device", "cpu")
    code, out, err = run(capsys, "profile", *device, *words.replace("{}", str(tmp_path)).split())
    assert (code, out) == (2, "") and "Traceback" not in err
    assert "Measuring" not in err or words.endswith("--device tpu")
    assert says.replace("{}", str(tmp_path)) in err.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "code", "why"),
    [
        ("/proc/a.json", 2, "No such file or directory"),
        ("/dev/full", 1, "No space left on device"),
        ("{}/" + "x" * 250, 2, "File name too long"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_measured(
    nothing_is_measured, tmp_path, capsys, path, code, why
):
    path = path.replace("{}", str(tmp_path))
    if not os.path.exists(os.path.dirname(path)):
        pytest.skip(f"there is no {path}")
    got, _, err = run(capsys, "profile", "--device", "cpu", "-o", path)
    assert "Measuring" not in err and "Traceback" not in err and "--output: " in err
    assert got == code and (why in err or "may not be written" in err) and path in err
    assert list(tmp_path.iterdir()) == []
    # What is there stays, and nothing is left beside it.
    old = tmp_path / "old.json"
    old.write_text("old")
    _, _, err = run(capsys, "profile", "mixtral-9x9b", "--device", "cpu", "-o", old)
    assert "is no model" in err
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_may_not_be_written_is_refused(nothing_is_measured, tmp_path, capsys):
    tmp_path.chmod(0o500)
    code, _, err = run(capsys, "profile", "--device", "cpu", "-o", tmp_path / "x.json")
    assert code == 2 and "may not be written" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_fault_of_the_machine(nothing_is_measured, tmp_path, capsys):
    code, _, err = run(capsys, "profile", "--device", "cuda", "-o", tmp_path / "x.json")
    assert code == 1 and "torch sees no CUDA device" in err


def test_memory_that_runs_out_is_a_fault_of_the_machine(
    folder, quick, tmp_path, capsys, monkeypatch
):
    def full(*_, **__):
        raise MemoryError("an allocation failed")

    monkeypatch.setattr(table_module, "company", full)
    code, _, err = run(
        capsys, "profile", folder, "--device", "cpu", "--seconds", 10, "-o", tmp_path / "x.json"
    )
    assert code == 1 and "out of host memory" in err and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("name", ["mixtral-9x9b", "qwen3-30b-a3b"])
def test_a_model_that_cannot_be_measured_is_refused_before_torch_is_there(
    tmp_path, capsys, monkeypatch, name
):
    import sys

    monkeypatch.delitem(mg.__dict__, "Engine", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run(capsys, "profile", name, "-o", tmp_path / "x.json")
    assert code == 2 and name in err and "Measuring" not in err and "pip" not in err


def test_without_torch_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.delitem(mg.__dict__, "Engine", raising=False)
    monkeypatch.delitem(sys.modules, "moegen.exec.engine", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run(capsys, "profile", "-o", tmp_path / "x.json")
    assert code == 1 and "pip install 'moegen[run]'" in err
