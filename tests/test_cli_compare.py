"""``moegen compare``: from files of timelines to tables, a picture and a trace."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import matplotlib
import pytest
from small_models import mixtral

import moegen as mg
from moegen.cli import main
from moegen.graph import files as files_of_moegen
from moegen.timeline import Timeline

matplotlib.use("agg")
S = mg.Strategy(B=4, b_a=2, b_e=8, omega=0.5)


def _main(capsys, *words) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


@pytest.fixture
def files(tmp_path):
    """A prediction, and what was measured: a run of a machine with a slower link."""
    graph = mg.build(mixtral(), S, phase="decode", kv_len=20)
    hw = mg.HardwareSpec.from_name("h200")
    mg.simulate(graph, mg.CostModel.roofline(hw), steps=4).save(tmp_path / "sim.json")
    slow = mg.CostModel.roofline(hw.with_(copy_latency_s=1e-3))
    shapes = [mg.Shape.uniform(4, n, 1) for n in (19, 20, 21, 22)]
    run = mg.simulate(graph, slow, shapes=shapes)
    meta = {"shapes": [s.to_dict() for s in shapes]}
    Timeline(graph, run.ids, run.start_s, run.end_s, source="measured", meta=meta).save(
        tmp_path / "real.json"
    )
    return tmp_path


def test_it_prints_what_the_python_api_says(files, capsys):
    sim, real = Timeline.load(files / "sim.json"), Timeline.load(files / "real.json")
    code, out, err = _main(capsys, "compare", files / "sim.json", files / "real.json")
    assert (code, out, err) == (0, f"{mg.compare(sim, real)}\n", "")
    assert "task cost" in out and "copy_expert" in out


@pytest.mark.parametrize(
    ("flags", "cost"),
    [
        (("--profile", "h200"), lambda: mg.CostModel.from_profile("h200")),
        (("--hw", "c2"), lambda: mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))),
    ],
)
def test_a_machine_stands_in_the_place_of_a_prediction(files, capsys, flags, cost):
    code, out, _ = _main(capsys, "compare", files / "real.json", *flags, "--json")
    expected = mg.compare(cost(), Timeline.load(files / "real.json")).to_dict()
    assert code == 0 and json.loads(out) == json.loads(json.dumps(expected))
    assert expected["parts"][0]["seconds"] != 0


def test_a_profile_of_any_machine_is_taken_as_meant(files, capsys):
    from moegen.graph.profile_table import CATALOGUE

    mine = files / "mine.json"
    mine.write_text((CATALOGUE / "h200.json").read_text())
    code, by_file, _ = _main(capsys, "compare", files / "real.json", "--profile", mine)
    assert code == 0
    code, by_name, err = _main(capsys, "compare", files / "real.json", "--profile", "h200")
    assert (code, by_file) == (0, by_name) and "Predicted from the profile of" in by_name
    # It is not known whose the run is.
    assert "warning: " in err and "real.json does not say which machine it was measured on" in err


def test_a_machine_that_is_not_the_runs_is_warned_about(files, capsys):
    real, here = Timeline.load(files / "real.json"), files / "here.json"
    real.meta["machine"] = {"gpu_name": "none (CPU lanes)", "cpu_name": "Ryzen 9, 2 cores"}
    real.save(here)
    for flag, of in (("--profile", "h200"), ("--hw", "c2")):
        code, out, err = _main(capsys, "compare", here, flag, of)
        assert code == 0 and "Measured on CPU lanes (no GPU); Ryzen 9, 2 cores" in out
        assert "moegen: warning: the prediction is of another machine than the run" in err
        assert "'Ryzen 9, 2 cores'" in err


def test_it_says_where_the_rates_of_a_prediction_come_from(files, capsys, monkeypatch):
    from moegen.cli.words import origin_of_rates

    c2 = mg.HardwareSpec.from_name("c2")
    guessed = dict.fromkeys(c2.rates, "assumed: a guess")
    here = mg.HardwareSpec.from_dict(c2.to_dict() | {"name": "vm", "source": guessed})
    monkeypatch.setattr(mg.HardwareSpec, "detect", classmethod(lambda _: here))
    _, out, _ = _main(capsys, "compare", files / "real.json", "--hw", "here")
    assert "Predicted from the rates of vm (" in out
    assert out.endswith("\nRates    of the prediction: all assumed\n")
    # The same words as in a plan, of a profile's machine too.
    h200 = mg.CostModel.from_profile("h200").hw
    _, out, _ = _main(capsys, "compare", files / "real.json", "--profile", "h200")
    said = " ".join(out[out.index("\nRates ") :].split())
    assert said == f"Rates of the prediction: {origin_of_rates(h200)}"
    # A prediction in a file does not say what its rates were.
    _, out, _ = _main(capsys, "compare", files / "sim.json", files / "real.json")
    assert "\nRates " not in out


def test_files_for_tables_pictures_and_traces(files, capsys):
    names = {"--csv": "tasks.csv", "--plot": "error.png", "--trace": "both.json"}
    flags = [word for flag, name in names.items() for word in (flag, files / name)]
    code, _, err = _main(capsys, "compare", files / "sim.json", files / "real.json", *flags)
    assert code == 0 and all(name in err for name in names.values())
    real = Timeline.load(files / "real.json")
    with (files / "tasks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["op"], int(r["step"])) for r in rows] == [(i.op, i.step) for i in real.ids]
    assert (files / "error.png").stat().st_size > 10_000
    events = json.loads((files / "both.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 2 * len(real)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("real.json",), "real.json to be compared with? Give the predicted timeline before it"),
        (("real.json", "sim.json"), "the first timeline is the measured one"),
        (("sim.json", "real.json", "real.json"), "two timelines are compared, and 3 files"),
        (("sim.json", "real.json", "--hw", "c2"), "--hw stands in the place of the predicted"),
        (("real.json", "--hw", "c2", "--profile", "h200"), "drop one"),
        (("real.json", "--profile", "h20"), "--profile: 'h20' is no file, and none of h200"),
        (("real.json", "--hw", "c4"), "--hw: 'c4' is no file"),
        (("none.json", "real.json"), "moegen: cannot read the timeline none.json: No such file"),
        (("graph.json", "real.json"), "graph.json: not a timeline"),
        (("text.txt", "real.json"), "text.txt is not JSON"),
        (("other.json", "real.json"), "the timelines are of different graphs"),
        (("sim.json", "real.json", "--plot", "e.doc"), "--plot: e.doc is no kind of picture"),
        (("sim.json", "real.json", "--csv", "no/t.csv"), "--csv: no is no folder"),
        (("sim.json", "real.json", "--csv", "./real.json"), "--csv: real.json is read: name"),
        (
            ("sim.json", "real.json", "--csv", "a.csv", "--trace", "a.csv"),
            "--trace: --csv a.csv is written: name another file",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(files, capsys, monkeypatch, words, reason):
    monkeypatch.chdir(files)
    Timeline.load("sim.json").graph.to_json("graph.json")
    (files / "text.txt").write_text("hello")
    graph = mg.build(mixtral(), mg.Strategy(B=4, b_a=4, b_e=8), phase="decode", kv_len=20)
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name("h200"))
    mg.simulate(graph, cost).save("other.json")
    code, out, err = _main(capsys, "compare", *words)
    assert (code, out) == (2, "") and reason in err and "Traceback" not in err


def test_simulate_saves_what_compare_reads(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    point = "mixtral-8x7b --hw c2 --B 64 --b-a 64"
    code, out, _ = _main(capsys, *f"simulate {point} --timeline one.json --json".split())
    run = Timeline.load("one.json")
    assert code == 0 and run.period_s == json.loads(out)["period_s"] and run.cost is not None
    _main(capsys, *f"simulate {point} --gen-len 512 --timeline two.json".split())
    code, out, err = _main(capsys, "compare", "one.json", "two.json", "--json")
    assert "warning: the measured timeline was simulated: two predictions are compared" in err
    result = json.loads(out)
    # Longer answers: the KV to fetch is what costs more.
    assert code == 0 and result["error"] < 0 and result["task_cost"][0]["op"] == "fetch_kv"


@pytest.fixture
def full_disk(monkeypatch):
    """Of every file so much is written, and then the disk is full."""

    def half(path, data):
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    def begin():
        monkeypatch.setattr(files_of_moegen, "_try", lambda path: None)  # it becomes full later
        monkeypatch.setattr(Path, "write_bytes", half)

    return begin


@pytest.mark.parametrize("flag", ["--csv", "--plot", "--trace"])
def test_on_a_full_disk_the_old_file_stays_and_the_flag_is_named(files, capsys, full_disk, flag):
    file = files / "out.png"
    file.write_text("old")
    full_disk()
    code, out, err = _main(capsys, "compare", files / "sim.json", files / "real.json", flag, file)
    assert code == 1 and "task cost" in out and file.read_text() == "old"
    assert f"moegen: {flag}: cannot write the " in err
    assert err.endswith(f"to {file}: No space left on device\n")
    assert {path.name for path in files.iterdir()} == {"sim.json", "real.json", "out.png"}


@pytest.mark.parametrize("flag", ["-o", "--plot"])
def test_so_it_does_for_a_sweep(tmp_path, capsys, full_disk, flag):
    file = tmp_path / "out.png"
    file.write_text("old")
    full_disk()
    work = "--n 8 --prompt-len 16 --gen-len 8 --b-a 4 --omega 0,.5 --B 8"
    code, out, err = _main(capsys, *f"sweep mixtral-8x7b --hw c2 {work}".split(), flag, file)
    assert code == 1 and "decode tok/s" in out and file.read_text() == "old"
    assert f"moegen: {'--plot' if flag == '--plot' else '--output'}: cannot write the " in err
    assert err.endswith(f"to {file}: No space left on device\n")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("link", ["hardlink_to", "symlink_to"])
def test_a_link_to_what_is_read_is_not_written_over(files, capsys, link):
    real, other = files / "real.json", files / "other.json"
    getattr(other, link)(real)
    before = real.read_bytes()
    code, _, err = _main(capsys, "compare", files / "sim.json", real, "--csv", other)
    assert code == 2 and f"--csv: {real} is read: name another file" in err
    code, _, err = _main(
        capsys, *"simulate mixtral-8x7b --hw c2 --B 8 --b-a 8 --trace".split(), other,
        "--timeline", real,
    )  # fmt: skip
    assert code == 2 and f"--timeline: --trace {other} is written: name another" in err
    assert real.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        "simulate {} --hw c2 --B 8 --b-a 4 --prompt-len 8 --gen-len 4 --timeline {}/config.json",
        "sweep {} --hw c2 --omega 0,1 -o {}/out.csv",
        "profile {} --device cpu --seconds 10 -o {}/config.json",
        "bench {} --timeline {}/under/config.json",
    ],
    ids=lambda words: words.split()[0],
)
def test_nothing_is_written_into_a_folder_that_is_read(tmp_path, capsys, words):
    """A profile over a model's config.json took the model with it."""
    folder = tmp_path / "model"
    (folder / "under").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    code, _, err = _main(capsys, *words.format(folder, folder).split())
    assert code == 2 and f"is in {folder}, a folder that is read: name a file elsewhere" in err
    assert (folder / "config.json").read_text() == "{}" and not (folder / "out.csv").exists()
    link = tmp_path / "link"
    link.symlink_to(folder)
    code, _, err = _main(capsys, *words.format(folder, link).split())
    assert code == 2 and "a folder that is read" in err


def test_a_sweep_does_not_write_over_what_it_reads(tmp_path, capsys):
    from moegen.graph.profile_table import CATALOGUE

    mine = tmp_path / "mine.json"
    mine.write_bytes((CATALOGUE / "h200.json").read_bytes())
    words = f"sweep mixtral-8x7b --profile {mine} --omega 0,1 -o {mine}"
    code, _, err = _main(capsys, *words.split())
    assert code == 2 and f"--output: {mine} is read" in err
    assert mine.read_bytes() == (CATALOGUE / "h200.json").read_bytes()
