"""The report on predictions says what the raw results say, and so do the figures in it.

The whole way to it is gone on CPU lanes with tiny models, by the scripts that run on the GPU.
"""

# The scripts are found once their folder is in the path.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import faulthandler
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest

import moegen as mg
from moegen.graph.company import Company
from moegen.graph.curve import Curve
from moegen.graph.hardware import field_names
from moegen.graph.latencies import Latencies
from moegen.graph.profile_table import CATALOGUE, ProfileTable

matplotlib.use("agg")

FOLDER = Path(__file__).parents[1] / "benchmarks" / "h200" / "prediction"
PARTS = ["task cost", "scheduling and contention", "untracked overhead"]


@pytest.fixture(scope="module")
def scripts():
    """The scripts that need no torch."""
    paths = [str(FOLDER), str(FOLDER.parent)]
    sys.path[:0] = paths
    import draw
    import judge
    import kept
    import predict
    import ship
    import shown
    import shown_delays
    import shown_ops
    import situations
    import write_report

    yield SimpleNamespace(
        draw=draw, judge=judge, kept=kept, predict=predict, ship=ship, situations=situations,
        report=write_report, shown=shown, ops=shown_ops, delays=shown_delays,
    )  # fmt: skip
    for path in paths:
        sys.path.remove(path)


def close(a, b, where=""):
    """Equal but for rounding, all the way down."""
    assert type(a) is type(b) or {type(a), type(b)} <= {int, float}, where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            close(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, f"{where}[{i}]")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-9), where
    else:
        assert a == b, where


# What is committed.


def test_report_is_that_of_the_results(scripts):
    text = scripts.report.REPORT.read_text(encoding="utf-8")
    assert text == scripts.report.report(), "python benchmarks/h200/prediction/write_report.py"
    if not scripts.kept.Kept().there:
        assert "Nothing has been measured yet." in text


def test_the_readme_says_what_was_found(scripts):
    kept = scripts.kept.Kept()
    if not kept.there:
        pytest.skip("nothing has been measured yet: there is no results folder")
    readme = (FOLDER.parents[2] / "README.md").read_text(encoding="utf-8")
    begin, end = "in under two minutes.\n\n", "\n\nThe report says which operations"
    said = readme.partition("How far predictions hold by a profile")[2].partition(end)[0]
    bullets = said.partition(begin)[2]
    assert bullets.startswith("- ")
    words = bullets.removeprefix("- ").replace("\n- ", " ")
    assert words == " ".join(scripts.shown.summary(kept)), "write_report.py says what README must"


def test_predictions_follow_from_the_results(scripts):
    kept = scripts.kept.Kept()
    if not kept.there:
        pytest.skip("nothing has been measured yet: there is no results folder")
    close(json.loads(json.dumps(scripts.predict.predict(kept))), kept.predicted)
    assert sum(path.stat().st_size for path in kept.folder.iterdir()) < 3e6


def test_the_profile_that_ships_is_the_one_in_the_results(scripts):
    if not scripts.kept.Kept().there:
        pytest.skip("nothing has been measured yet: there is no results folder")
    table = scripts.ship.shipped(ProfileTable.load(scripts.ship.RESULT))
    text = scripts.ship.SHIPPED.read_bytes().decode("utf-8")
    assert text == table.to_json(), "python benchmarks/h200/prediction/ship.py"


def test_a_profile_ships_as_it_was_measured_on_the_catalogues_machine(scripts):
    """Of a made-up one: what was measured stays, what no profile measures is the catalogue's."""
    hw = mg.HardwareSpec.from_name("h200")
    machine = dataclasses.replace(
        hw, name="a-host", gpu_name="NVIDIA H200", cpu_name="Xeon, 16 cores",
        gpu_memory_bytes=1e11, host_memory_bytes=2e12, gpu_flops=8e14,
        gpu_efficiency=((1, 0.01), (64, 0.5), (4096, 1.0)), h2d_bytes_per_s=50e9,
        gpu_workspace_bytes=1.0, load_bytes_per_s=None, link_peak_bytes_per_s=None,
        rental_usd_per_hour=None, copy_floor_s=None, cpu_call_s=1e-6,
        source={"gpu_flops": "measured", "gpu_efficiency": "measured", "copy_floor_s": "none"},
    )  # fmt: skip
    copies = Curve(("copy_expert",), {"h2d_bytes": (1e6, 1e9)}, (1e-4, 0.02), "made up")
    company = (Company("h2d", "host_memory", 0.9, "made up"),)
    latencies = Latencies(1e-5, 2e-5, 3e-5)
    measured = ProfileTable(
        machine, "2026-11-30", {"torch": "2.11.0"}, "bfloat16", (copies,), {}, company, latencies
    )
    table = scripts.ship.shipped(measured)
    for key in ("date", "versions", "dtype", "curves", "company", "latencies"):
        assert getattr(table, key) == getattr(measured, key), key
    given = {
        "name", "gpu_memory_bytes", "host_memory_bytes", "gpu_flops", "gpu_workspace_bytes",
        "load_bytes_per_s", "link_peak_bytes_per_s", "price_usd", "power_w", "rental_usd_per_hour",
    }  # fmt: skip
    for key in field_names():
        of = hw if key in given else machine
        if key != "gpu_efficiency":
            assert getattr(table.machine, key) == getattr(of, key), key
    for tokens in (1, 30, 64, 1000, 9000):
        products = table.machine.gpu_flops * table.machine.efficiency(tokens)
        assert products == pytest.approx(8e14 * machine.efficiency(tokens), rel=1e-12)
    assert table.machine.kind("gpu_flops") == "data sheet"
    assert "copy_floor_s" not in table.machine.source
    assert table.peaks == {"gpu_bytes_per_s": 4.8e12, "host_bytes_per_s": None}
    with pytest.raises(mg.InvalidInput, match="the GPU there is 'NVIDIA H100' and here 'H200'"):
        other = dataclasses.replace(machine, gpu_name="NVIDIA H100")
        scripts.ship.shipped(dataclasses.replace(measured, machine=other))
    with pytest.raises(mg.InvalidInput, match="above the peak of 63"):
        wrong = dataclasses.replace(copies, seconds=(1e-4, 0.01))
        scripts.ship.shipped(dataclasses.replace(measured, curves=(wrong,)))


def test_without_results_the_report_says_so(scripts, tmp_path):
    assert "Nothing has been measured yet." in scripts.report.report(tmp_path)
    with pytest.raises(mg.InvalidInput, match="no measured.json"):
        scripts.kept.keep(tmp_path, tmp_path / "results")


def test_what_was_not_measured_is_not_met(scripts, tmp_path):
    """No situation, none that binds, no point: that all of none agree says nothing."""
    less = tmp_path / "less"
    shutil.copytree(scripts.kept.RESULTS, less)

    def edit(name, change):
        data = json.loads((less / name).read_text(encoding="utf-8"))
        change(data)
        (less / name).write_text(json.dumps(data), encoding="utf-8")
        return scripts.report.report(less)

    def none_binds(slopes):
        for situation in slopes["situations"]:
            situation["slopes"] = [r for r in situation["slopes"] if not r["binds"]]

    text = edit("slopes.json", none_binds)
    assert "| 3. within 20% for those that bind | 0 of 0 | **no**, 1 short |" in text
    text = edit("slopes.json", lambda slopes: slopes.update(situations=[]))
    assert "They have not been measured." in text
    for what in ("slopes agree in sign for all classes", "within 20% for those that bind"):
        assert f"| 3. {what} | not measured | **no** |" in text
    text = edit("predicted.json", lambda predicted: predicted.update(points=[]))
    assert "Nothing has been predicted yet." in text


RUN = {
    "model": "m", "layers": 2, "name": "decode-1-0", "phase": "decode", "run": 0,
    "strategy": {"B": 4, "b_a": 2, "b_e": 8, "omega": 0.0, "kv_slots": 2, "dense_slots": 2},
    "lengths": [[8, 4]], "timeline": "decode-1-0.json.gz", "period_s": 1.0,
    "step_end_s": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip


def half_measured(scripts, tmp_path):
    """Where a run was measured whose timeline is not there, a results folder, and what is in it."""
    raw, folder = tmp_path / "raw", tmp_path / "results"
    raw.mkdir()
    shutil.copytree(scripts.kept.RESULTS, folder)
    (raw / "measured.json").write_text(json.dumps({"points": [RUN], "failed": []}))
    shutil.copy(folder / "profile.json", raw)
    return raw, folder, {path.name: path.read_bytes() for path in folder.iterdir()}


def test_results_are_not_written_over_by_half_a_measurement(scripts, tmp_path):
    raw, folder, before = half_measured(scripts, tmp_path)
    with pytest.raises(mg.InvalidInput, match=r"decode-1-0.json.gz, the timeline of decode-1-0"):
        scripts.kept.keep(raw, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for points, profile, says in (
        ([], None, "measured.json has no measured run: run measure.py"),
        ([RUN, RUN], None, "run 0 of decode-1-0 is there twice"),
        ([RUN, RUN | {"run": 1}], None, "its timeline decode-1-0.json.gz is another's, too"),
        ([{k: v for k, v in RUN.items() if k != "model"}], None, r"points\[0\] has no model"),
        ([RUN], "{", "profile.json"),
        ([RUN], "", "has no profile.json: run measure.py"),
    ):
        (raw / "measured.json").write_text(json.dumps({"points": points, "failed": []}))
        if profile is not None:
            (raw / "profile.json").write_text(profile)
            if not profile:
                (raw / "profile.json").unlink()
        with pytest.raises(mg.InvalidInput, match=says):
            scripts.kept.keep(raw, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_timeline_of_another_run_is_refused(scripts, tmp_path):
    """Its ops may be the same: predictions would be held against what nobody asked for."""
    kept = scripts.kept.Kept()
    run = kept.measured["points"][0]
    kept.timeline(run)
    for more, says in (
        ({"model": "other"}, "it is not of 4 layers of other"),
        ({"layers": 3}, "it is not of 3 layers of"),
        ({"strategy": run["strategy"] | {"b_a": 7}}, f"not of the strategy of {run['name']}"),
        ({"step_end_s": [2 * x for x in run["step_end_s"]]}, "not of these steps"),
    ):
        with pytest.raises(mg.InvalidInput, match=says):
            kept.timeline(run | more)
    data = kept.data(run) | {"source": "simulated"}
    kept.data = lambda run: data
    with pytest.raises(mg.InvalidInput, match="it is not of a run"):
        kept.timeline(run)
    # Nor are predictions of steps that took something else.
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    for point in measured["points"]:
        point["step_end_s"] = [2 * x for x in point["step_end_s"]]
    (folder / "measured.json").write_text(json.dumps(measured), encoding="utf-8")
    with pytest.raises(mg.InvalidInput, match=r"other runs: steps of .* s in the predictions: run"):
        scripts.report.report(folder)


@pytest.mark.cpu
def test_the_same_measurement_kept_again_is_not_a_first_time(scripts, made, tmp_path):
    raw, results = made
    folder = tmp_path / "results"
    scripts.kept.keep(raw, folder)
    assert not (folder / "first.json").exists() and not (folder / "predicted.json").exists()
    shutil.copy(results / "first.json", folder)
    scripts.kept.keep(raw, folder)
    assert (folder / "first.json").read_bytes() == (results / "first.json").read_bytes()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] * 5 + [".zip"]
    # Of other runs it says nothing.
    less = tmp_path / "less"
    shutil.copytree(raw, less)
    data = json.loads((less / "measured.json").read_text(encoding="utf-8"))
    data["points"].pop()
    (less / "measured.json").write_text(json.dumps(data), encoding="utf-8")
    scripts.kept.keep(less, folder)
    assert not (folder / "first.json").exists()


def test_predictions_of_other_runs_are_refused(scripts, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    path = folder / "measured.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    *others, last = data["points"]
    data["points"] = others
    path.write_text(json.dumps(data), encoding="utf-8")
    said = rf"of other runs: {last['model']} {last['name']} has \d measured, and \d in the pred"
    with pytest.raises(mg.InvalidInput, match=said):
        scripts.report.report(folder)
    kept = scripts.kept.Kept(folder)
    with pytest.raises(mg.InvalidInput, match=r"timelines.zip has no nothing.json"):
        kept.data({"timeline": "nothing.json"})
    (folder / "timelines.zip").unlink()
    with pytest.raises(mg.InvalidInput, match=r"timelines.zip, the timelines of all runs, is miss"):
        scripts.predict.predict(kept)


def test_nothing_is_predicted_of_nothing(scripts, tmp_path):
    """An empty predicted.json took the place of a good one."""
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    (folder / "measured.json").unlink()
    before = (folder / "predicted.json").read_bytes()
    with pytest.raises(mg.InvalidInput, match=r"results has no measured.json: run measure.py .*k"):
        scripts.predict.main([str(folder)])
    assert (folder / "predicted.json").read_bytes() == before
    (folder / "measured.json").write_text('{"points": [], "failed": []}')
    with pytest.raises(mg.InvalidInput, match="no measured run"):
        scripts.predict.main([str(folder)])
    with pytest.raises(mg.InvalidInput, match="nowhere is no folder: run measure.py"):
        scripts.predict.main([str(tmp_path / "nowhere")])
    assert not (tmp_path / "nowhere").exists()
    assert (folder / "predicted.json").read_bytes() == before


def test_results_that_are_cut_short_are_named(scripts, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)

    def cut(name):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
        return whole

    for name, remedy in (
        ("measured.json", "run measure.py OUT and kept.py OUT"),
        ("predicted.json", "run predict.py"),
        ("slopes.json", "run measure.py OUT and kept.py OUT"),
    ):
        whole = cut(name)
        with pytest.raises(mg.InvalidInput, match=rf"{name} is not JSON: .*: {remedy}"):
            scripts.report.report(folder)
        (folder / name).write_text("[]")
        with pytest.raises(mg.InvalidInput, match=rf"{name} is damaged: .*: {remedy}"):
            scripts.report.report(folder)
        (folder / name).write_bytes(whole)
    (folder / "measured.json").write_text("{}")
    with pytest.raises(mg.InvalidInput, match=r"measured.json is damaged: it has no points"):
        scripts.kept.Kept(folder)
    (folder / "measured.json").write_bytes((scripts.kept.RESULTS / "measured.json").read_bytes())
    kept = scripts.kept.Kept(folder)
    run = kept.measured["points"][0]
    whole = cut("timelines.zip")
    with pytest.raises(mg.InvalidInput, match=r"timelines.zip cannot be read: .*: run measure.py"):
        kept.data(run)
    # The list of its files is there, and what is in them is not.
    (folder / "timelines.zip").write_bytes(whole[:2000] + bytes(50_000) + whole[52_000:])
    with pytest.raises(mg.InvalidInput, match=r"timelines.zip cannot be read: .*: run measure.py"):
        for run in kept.measured["points"]:
            kept.data(run)
    # Predictions that are damaged are made again.
    cut("predicted.json")
    assert scripts.kept.Kept(folder).there


def without(*path):
    """Takes a key, or what an index holds, out of data."""

    def change(data):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def with_(value, *path):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("measured.json", without("points", 3, "step_end_s"), r"points\[3\] has no step_end_s"),
        ("measured.json", without("points", 0, "model"), r"points\[0\] has no model"),
        ("measured.json", with_("a point", "points", 1), r"points\[1\] must be dict, and is str"),
        ("measured.json", with_([{}], "failed"), r"failed\[0\] has no model"),
        ("measured.json", with_([1.0, 1.0, 1.0, 1.0], "points", 0, "step_end_s"), "each after the"),
        ("measured.json", with_([1.0], "points", 0, "step_end_s"), "there must be 3, each after"),
        ("measured.json", with_(True, "points", 0, "run"), r"points\[0\].run must be int, and is"),
        ("measured.json", with_([], "points", 0, "lengths"), r"points\[0\].lengths is empty"),
        ("measured.json", with_([9], "points", 0, "lengths", 0), r"lengths\[0\] must have 2 items"),
        ("measured.json", without("machine", "gpu"), "machine has no gpu"),
        ("predicted.json", without("points"), "it has no points"),
        ("predicted.json", without("curve"), "it has no curve"),
        ("predicted.json", without("points", 2, "error"), r"points\[2\] has no error"),
        ("predicted.json", with_(0, "points", 2, "measured_s"), r"measured_s is 0, and must be ab"),
        ("predicted.json", without("points", 2, "strategy", "b_a"), r"\[2\].strategy has no b_a"),
        ("predicted.json", without("points", 2, "parts", PARTS[0]), r"parts has no task cost"),
        ("predicted.json", without("points", 2, "ops", "expert", "lane"), "ops.expert has no lane"),
        ("predicted.json", with_(0, "points", 2, "ops", "expert", "tasks"), "must be above 0"),
        ("predicted.json", without("curve", 4, "low"), r"curve\[4\] has no low"),
        ("predicted.json", with_(math.nan, "points", 2, "error"), r"\[2\].error is nan, and must"),
        ("predicted.json", with_(float("inf"), "curve", 1, "low"), r"curve\[1\].low is inf"),
        ("slopes.json", without("situations"), "it has no situations"),
        ("slopes.json", without("situations", 1, "slopes"), r"situations\[1\] has no slopes"),
        ("slopes.json", without("situations", 1, "slopes", 2, "se"), r"slopes\[2\] has no se"),
        ("profile_notes.json", without("notes"), "it has no notes"),
        ("profile_notes.json", without("seconds"), "it has no seconds"),
        ("profile_notes.json", with_([7], "notes"), r"notes\[0\] must be str, and is int"),
        ("first.json", without("per_op"), "it has no per_op"),
        ("others.json", with_("none", "measurements"), "measurements must be list, and is str"),
        ("others.json", without("measurements", 1, "why"), r"measurements\[1\] has no why"),
    ],
)
def test_results_that_lack_something_are_named(scripts, tmp_path, name, change, says):
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    data = json.loads((folder / name).read_text(encoding="utf-8"))
    change(data)
    (folder / name).write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(mg.InvalidInput, match=f"{name} is damaged: .*{says}"):
        scripts.report.report(folder)


def test_results_may_lack_what_is_not_always_known(scripts, tmp_path):
    """How far runs are apart of a point that ran once, and an error where 0 was predicted."""
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    measured, predicted, slopes, notes = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("measured.json", "predicted.json", "slopes.json", "profile_notes.json")
    )
    once = predicted["points"][0]
    key = once["model"], once["name"]
    runs = [p for p in measured["points"] if (p["model"], p["name"]) == key]
    measured["points"] = [p for p in measured["points"] if p not in runs[1:]]
    del measured["machine"]
    once |= {"spread": None, "runs_s": once["runs_s"][:1]}
    once["ops"] = {op: of | {"spread": None} for op, of in once["ops"].items()}
    slopes["situations"][0]["slopes"][0]["error"] = None
    del notes["compiled_s"]
    for name, data in (
        ("measured", measured), ("predicted", predicted), ("slopes", slopes),
        ("profile_notes", notes),
    ):  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    (folder / "others.json").unlink()
    text = scripts.report.report(folder)
    assert text.count("| one run |") == 1 and "of compiling" not in text


def test_a_kept_timeline_that_lacks_something_is_named(scripts, tmp_path):
    """Of the runs that are not the quickest, too."""
    import zipfile

    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    kept = scripts.kept.Kept(folder)
    runs = next(kept.points())
    slow = max(runs, key=lambda run: scripts.predict.step_s(run["step_end_s"]))
    data = {run["timeline"]: kept.data(run) for run in runs}
    del data[slow["timeline"]]["start_s"]
    with zipfile.ZipFile(folder / "timelines.zip", "w") as z:
        for name, of in data.items():
            z.writestr(name, json.dumps(of))
    said = rf"timelines.zip, {slow['timeline']}: the timeline is damaged: .*start_s.*: run measure"
    with pytest.raises(mg.InvalidInput, match=said):
        scripts.predict.point(kept, runs)


def test_a_file_where_a_folder_should_be_is_named(scripts, tmp_path):
    raw, _, _ = half_measured(scripts, tmp_path)
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(mg.InvalidInput, match="file is a file, and results go to a folder"):
            scripts.kept.keep(raw, folder)
    assert (tmp_path / "file").read_text() == "mine"
    cut = {k: v for k, v in RUN.items() if k != "timeline"}
    (raw / "measured.json").write_text(json.dumps({"points": [cut], "failed": []}))
    with pytest.raises(mg.InvalidInput, match=r"points\[0\] has no timeline: run measure.py"):
        scripts.kept.keep(raw, tmp_path / "results")


@pytest.mark.parametrize("name", ["ship", "write_report", "predict", "kept", "stand_in", "measure"])
def test_asked_for_help_a_script_does_nothing_else(name, tmp_path):
    pytest.importorskip("torch")
    # A copy: it writes beside itself. What it ships is checked where it is.
    folder = tmp_path / "h200"
    shutil.copytree(FOLDER.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = [*folder.rglob("*.*"), CATALOGUE / "h200.json"]
    before = {path: path.stat().st_mtime_ns for path in files}
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[2]), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, folder / "prediction" / f"{name}.py", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}.py")
    files = [*folder.rglob("*.*"), CATALOGUE / "h200.json"]
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--models", "nosuch"], "'nosuch' is none of the models .*: mixtral-8x7b, deepseek-v2"),
        (["--stage", "points"], "--stage points is of one model: name it with --model"),
        (["--stage", "slopes", "--model", "x"], "'x' is none of the models"),
        (["--runs", "0"], "--runs: '0' must be a whole number, 1 or more"),
        (["--budget-s", "nan"], "--budget-s: 'nan' must be seconds, from 0 to a day"),
        (["--profile-s", "1e18"], "--profile-s: '1e18' must be seconds"),
        (["--zip", "nowhere/all.zip"], "--zip nowhere/all.zip: no file can be there"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(scripts, tmp_path, capsys, args, says):
    pytest.importorskip("torch")
    import measure

    with pytest.raises(SystemExit):
        measure.main([str(tmp_path / "out"), *args])
    assert re.search(says, capsys.readouterr().err) and not (tmp_path / "out").exists()


@pytest.mark.cpu
def test_a_measurement_is_refused_where_it_cannot_be_written_or_gone_on_with(scripts, tmp_path):
    pytest.importorskip("torch")
    import measure
    import stand_in

    file, out = tmp_path / "file", tmp_path / "out"
    file.write_text("mine")
    for path in (file, file / "under"):
        with pytest.raises(mg.InvalidInput, match="file is a file, and what is measured goes to"):
            measure.main([str(path)])
    with pytest.raises(mg.InvalidInput, match="file is a file, and results go to a folder"):
        stand_in.stand_in(out, file)
    assert file.read_text() == "mine" and not out.exists()
    for stage in ("points", "slopes"):
        with pytest.raises(mg.InvalidInput, match="out has no profile.json: run --stage profile"):
            measure.main([str(out), "--stage", stage, "--model", "mixtral-8x7b"])
        faulthandler.cancel_dump_traceback_later()
    (out / "measured.json").write_text('{"points": [{}], "failed": []}')
    with pytest.raises(mg.InvalidInput, match=r"points\[0\] has no model: delete it, or measure"):
        measure.main([str(out)])


@pytest.mark.cpu
@pytest.mark.parametrize("until", [[], ["--deadline", "1e18"], ["--deadline", "nan"]], ids=str)
def test_a_stage_by_itself_measures_what_is_named(scripts, tmp_path, monkeypatch, until):
    """Without a deadline, or with one that no clock of a process's reaches."""
    pytest.importorskip("torch")
    import measure

    named = []

    def profile(models, **_):
        named.extend(model.name for model in models)
        return SimpleNamespace(save=lambda path: None)

    monkeypatch.setattr(measure.mg, "profile", profile)
    monkeypatch.setattr(measure, "cpu_decode", lambda threads: None)
    try:
        measure.main([str(tmp_path), "--stage", "profile", "--models", "deepseek-v2", *until])
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert named == ["deepseek-v2"]
    assert json.loads((tmp_path / "profile_notes.json").read_text())["notes"] == []


def test_a_measured_timeline_that_is_cut_short_is_named(scripts, tmp_path):
    import gzip

    raw, folder, before = half_measured(scripts, tmp_path)
    for data in (gzip.compress(b"{}" * 999)[:-9], b"{}", gzip.compress(b"{")):
        (raw / RUN["timeline"]).write_bytes(data)
        with pytest.raises(mg.InvalidInput, match=r"decode-1-0.json.gz cannot be read: .*: run me"):
            scripts.kept.keep(raw, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("script", ["predict.py", "kept.py"])
def test_what_a_script_refuses_is_one_line(script, tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parents[2]), *sys.path])}
    command = [sys.executable, FOLDER / script, tmp_path / "nowhere", tmp_path / "to"]
    done = subprocess.run(command[: 4 - (script == "predict.py")], env=env, capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{script}: ") and "nowhere" in line and "measure.py" in line


# The figures, against numbers worked out by hand.


def point(name, measured_s, predicted_s, spread=0.01, model="m", phase="decode", tokens=100.0):
    return {
        "name": name, "model": model, "phase": phase, "tokens": tokens, "spread": spread,
        "measured_s": measured_s, "predicted_s": predicted_s, "strategy": {},
    }  # fmt: skip


def test_time_of_a_step_is_the_median_of_those_that_count(scripts):
    # Steps of 5, 1, 2, 9 and 4 s after the first: the last does not count.
    assert scripts.predict.step_s(np.cumsum([3.0, 5, 1, 2, 9, 4])) == pytest.approx(3.5)
    runs = [{"step_end_s": np.cumsum([1.0, *each])} for each in ([2, 9, 2, 1], [3, 3, 3, 0])]
    assert scripts.predict.quickest(runs) is runs[0]


def test_a_corrected_run_is_doubted_beyond_the_worst_error_of_a_prediction(scripts):
    from moegen.sim.corrected import FAR

    assert FAR == scripts.judge.WORST


def test_errors_are_taken_without_their_sign(scripts):
    e = scripts.judge.Errors.of([0.01, -0.02, 0.05, -0.07])
    assert (e.n, e.worst, e.within_median, e.within_worst) == (4, 0.07, 0.5, 0.75)
    assert e.median == pytest.approx(0.035)


def test_order_counts_pairs_that_noise_cannot_turn_round(scripts):
    points = [
        point("a", 1.00, 1.00),
        point("b", 1.01, 0.90),  # too close to a
        point("c", 2.00, 2.10),
        point("d", 3.00, 2.05),  # told to be before c
        point("e", 9.00, 1.00, model="other"),
        point("f", 9.00, 1.00, phase="prefill"),
    ]
    r = scripts.judge.ranking(points, "step")
    assert (r.pairs, r.left_out) == (5, 1) and r.tau == pytest.approx((4 - 1) / 5)
    # By tokens a second it is the other way round where tokens make up for the time.
    points[2]["tokens"] = 400.0
    assert scripts.judge.ranking(points, "tokens").tau == pytest.approx((5 - 0) / 5)
    assert math.isnan(scripts.judge.ranking(points[:1], "step").tau)


def test_a_pair_that_is_predicted_equal_counts_for_neither_side(scripts):
    points = [point("a", 1.0, 1.0), point("b", 2.0, 1.0), point("c", 3.0, 3.0)]
    r = scripts.judge.ranking(points, "step")
    assert (r.pairs, r.tau) == (3, pytest.approx(2 / 3))


def test_regret_is_what_the_choice_loses(scripts):
    curve = [
        {"omega": 0.0, "tokens_per_s": 90.0, "measured_tokens_per_s": 80.0},
        {"omega": 0.5, "tokens_per_s": 120.0, "measured_tokens_per_s": 95.0},
        {"omega": 1.0, "tokens_per_s": 110.0, "measured_tokens_per_s": 100.0},
    ]
    planned = point("planned", 1.0, 1.0, tokens=97.0)
    planned["strategy"] = {"B": 4, "b_a": 2, "omega": 0.5}
    first, second = scripts.judge.regrets([planned], curve)
    assert (first["chosen"], first["best"]) == ("ω = 0.5", "ω = 1")
    assert first["regret"] == pytest.approx(0.05) and second["regret"] == pytest.approx(0.03)
    planned["tokens"] = 103.0
    assert scripts.judge.regrets([planned], curve)[1]["regret"] == 0
    assert scripts.judge.regrets([planned], []) == []


def test_ops_are_judged_by_the_median_over_points(scripts):
    def of(predicted_s, spread, **where):
        op = {"lane": "GPU", "tasks": 10, "measured_s": 1e-3, "spread": spread}
        return point("decode-1", 0.1, 0.1, **where) | {
            "ops": {"x": op | {"predicted_s": predicted_s}}
        }

    [good] = scripts.judge.by_op([of(1.02e-3, 0.1), of(0.97e-3, 0.1), of(3e-3, 0.1)])
    assert good["met"] and good["median"] == pytest.approx(0.03) and good["why"] == ""
    assert good["share"] == pytest.approx(0.01) and good["of_step"] == pytest.approx(0.0002)
    assert good["sign"] == 0
    [bad] = scripts.judge.by_op([of(0.5e-3, 0.7), of(0.6e-3, 0.7)])
    assert not bad["met"] and bad["signed"] == pytest.approx(-0.45) and bad["sign"] == -1
    assert "from run to run itself" in bad["why"]
    assert "takes 100 µs, 45 µs longer than predicted" in bad["why"]
    assert "too fast in 2 of 2 points" in bad["why"]
    # One model's error does not hide in another's.
    points = [
        of(1e-3, 0.1),
        of(1e-3, 0.1),
        of(4e-3, 0.1, model="n"),
        of(5e-4, 0.1, phase="prefill"),
    ]
    rows = {(r["model"], r["phase"]): r for r in scripts.judge.by_op(points)}
    medians = {where: r["median"] for where, r in rows.items()}
    expected = {("m", "decode"): 0, ("n", "decode"): 3.0, ("m", "prefill"): 0.5}
    assert medians == pytest.approx(expected) and rows["m", "decode"]["points"] == 2
    text = "\n".join(scripts.ops.ops(points)).split("<details>")
    assert "| op | lane | m decode | n decode | m prefill |" in text[0]
    assert "| `x` | GPU | ±0.0% of 1% | **+300.0%** of 1% | **-50.0%** of 1% |" in text[0]
    assert "- `x`, n decode: " in text[0] and "| `x` | GPU | n | decode | 1 | 1.0% |" in text[1]


def test_short_ops_are_folded(scripts):
    op = {"lane": "GPU", "tasks": 1, "measured_s": 1e-4, "predicted_s": 2e-4, "spread": None}
    long = op | {"measured_s": 0.05, "predicted_s": 0.05}
    points = [point("decode-1", 0.1, 0.1) | {"ops": {"brief": op, "long": long}}]
    shown, folded = "\n".join(scripts.ops.ops(points)).split("<details>")
    assert "`long`" in shown and "`brief`" not in shown and "None misses." in shown
    assert "| `brief` | GPU | m | decode |" in folded


def slope(op, predicted, measured, se, agrees=True, tasks=2):
    binds, error = predicted >= tasks / 2, predicted / measured - 1 if measured else None
    return {
        "op": op, "lane": "GPU", "tasks": tasks, "delay_s": 0.01, "predicted_slope": predicted,
        "measured_slope": measured, "se": se, "binds": binds, "agrees": agrees, "error": error,
    }  # fmt: skip


def test_slopes_that_bind_are_held_to_a_fifth_and_noise_tells_nothing(scripts):
    found = {
        "model": "m",
        "layers": 2,
        "situations": [
            {"name": "a", "slopes": [slope("near", 2.0, 1.8, 0.1), slope("far", 2.0, 1.5, 0.1)]},
            {
                "name": "b",
                "slopes": [
                    slope("none", 0.0, 0.02, 0.03),
                    slope("loud", 1.9, 2.4, 1.3),  # from -0.1 to 2.5 a task
                    slope("loud none", 0.0, -0.4, 0.3),
                    slope("wrong", 2.0, 0.0, 0.01, agrees=False),
                ],
            },
        ],
    }  # fmt: skip
    for situation in found["situations"]:
        situation |= {"kept": True, "context": 9, "share": 0.5, "steps": 9, "rounds": 3}
        situation["strategy"] = {"B": 4, "b_a": 2, "kv_slots": 1, "omega": 0.0}
    found["situations"][1]["kept"] = False
    stay, copied = "weights stay on the GPU", "weights are copied"
    rows = scripts.judge.slope_rows(found)
    assert [r["situation"] for r in rows] == [
        *[f"{stay}, attention on the GPU"] * 2,
        *[f"{copied}, attention on the GPU"] * 4,
    ]
    assert [r["told"] for r in rows] == [True, True, True, False, False, True]
    assert not any(r["edge"] for r in rows)
    assert rows[1]["measured"] == pytest.approx(0.75) and rows[1]["within"] == pytest.approx(0.1)
    s = scripts.judge.Slopes.of(rows)
    assert (s.classes, s.agree, s.edge, s.untold, s.binding, s.close) == (6, 3, 0, 2, 4, 1)
    text = "\n".join(scripts.delays.delays(found))
    assert f"- {copied}, attention on the GPU: B = 4, b_a = 2, 1 slot for KV, 9 tokens" in text
    loud = "| `loud` | GPU | 2 | 10.0 ms | 0.95 | 1.20 ± 1.30 | yes | cannot be told |"
    assert f"| {copied}, attention on the GPU {loud}" in text
    doubtful, far = text.split("Where the sign is on the edge")[1].split("Where an op that binds")
    assert [op for op in ("near", "far", "none", "loud", "loud none", "wrong")
            if f"`{op}`" in doubtful] == ["loud", "loud none", "wrong"]  # fmt: skip
    assert "`far`: predicted 1.00, measured 0.75 ± 0.10" in far and "near" not in far
    assert "Where nothing binds" not in text
    # What is small and known well is no noise.
    found["situations"][1]["slopes"].append(slope("small", 0.0, 0.096, 0.004))
    why = {"ops": ["small"], "why": "Why."}
    text = "\n".join(scripts.delays.delays(found, why))
    head, _, small = text.partition("Where nothing binds")
    assert "`small`: predicted 0.000, measured 0.048 ± 0.004\n\nWhy." in small
    assert not any(f"`{op}`" in small for op in ("none", "loud none", "wrong", "far"))
    assert "| 0.000 | 0.048 ± 0.004 | no | on the edge |" in head
    assert "Why." not in "\n".join(scripts.delays.delays(found, why | {"ops": ["other"]}))
    assert scripts.judge.Slopes.of(scripts.judge.slope_rows(found)).edge == 1
    said = scripts.shown._slopes(found)[0][1]
    assert "; 1 where a slope begins to count (0.05 by task): `small` where weights are" in said
    del found["situations"][1]["slopes"][-1]
    first, second = scripts.shown._slopes(found)
    assert first[1:] == (
        "3 of 6, in 2 situations; of 2 the noise hides it; not of `wrong` where weights are "
        "copied, attention on the GPU",
        "**no**, 1 short",
    )
    # In the picture too: one legend, situations in words, the op that disagrees.
    axes = scripts.draw.slopes(found)
    titles = [ax.get_title(loc="left") for ax in axes]
    assert titles == ["Weights stay on the GPU, attention on the GPU",
                      "Weights are copied, attention on the GPU"]  # fmt: skip
    assert [ax.get_legend() is not None for ax in axes] == [True, False]
    assert len({bar.get_facecolor() for ax in axes for bar in ax.patches}) == 1
    assert [len(ax.texts) for ax in axes] == [0, 2]  # one goes beyond the axis
    [said] = [t for t in axes[1].texts if t.get_text() == "sign not as predicted"]
    assert axes[1].get_yticklabels()[said.xy[1]].get_text().startswith("wrong ")
    assert second[1:] == ("1 of 4", "**no**, 3 short")
    found["situations"][1]["slopes"].pop()
    assert scripts.shown._slopes(found)[0][2] == "yes, where it can be told"


def curve(*rates, half=5.0):
    """Of equal predictions, in a band that reaches ``half`` to either side."""
    told = {"tokens_per_s": 100.0, "low": 100.0 - half, "high": 100.0 + half}
    at = np.linspace(0, 1, len(rates)).tolist()
    return [
        told | {"omega": w, "measured_tokens_per_s": rate}
        for w, rate in zip(at, rates, strict=True)
    ]


def test_a_bias_of_the_curve_is_no_scatter(scripts):
    [below, _] = scripts.report._bias(curve(98, 98, 97, 98, 101))
    assert "reaches 5.0% to either side" in below and "points are 2.0% off" in below
    assert "4 of 5 lie below the prediction: that is a bias" in below
    both = scripts.report._bias(curve(98, 103, 97, 101, 101))[0]
    assert "on both sides of the prediction, without a trend" in both and "5 of 5 lie" in both
    # Of one point nothing is said but whether it lies within.
    assert scripts.report._bias(curve(98))[0].endswith("and 1 would be expected of 90%.")


def test_a_curve_that_drifts_is_not_said_to_scatter(scripts):
    """Its points lay on both sides of the prediction, the first half on one, the others on one."""
    rates = (96.6, 96.3, 96.8, 97.1, 98, 99, 99.1, 98.9, 100.9, 101, 101.1)
    drifts = curve(*rates, half=1.4)
    [said, _] = scripts.report._bias(drifts)
    assert "the prediction is 3.4% too fast at ω = 0 and 1.1% too slow at ω = 1" in said
    assert "the predicted curve is less steep than the measured one" in said
    assert "changes by +0% as predicted, by +5% as measured" in said
    assert "6 of 11 lie within it, and 10 would be expected of 90%. So the band is too nar" in said
    assert scripts.judge.trend(range(11), rates) == pytest.approx(1 - 6 * 8 / (11 * 120))
    # In another order they are neither, and of few points nothing is told.
    mixed = (*rates[::2], *rates[1::2])
    assert scripts.judge.trend(range(11), mixed) is None
    assert scripts.judge.trend(range(4), rates[3:7]) is None
    assert scripts.judge.trend(range(9), [0.01] * 9) is None


def test_coverage_is_held_against_what_the_band_says(scripts):
    def of(inside):
        return scripts.judge.Coverage.of(curve(*[100] * inside, *[90] * (11 - inside)))

    assert [of(n).short for n in (11, 9, 8, 7, 6)] == [False, False, False, True, True]
    assert (of(6).inside, of(6).expected, of(6).n) == (6, 10, 11)
    what, found, met = scripts.shown._curve(curve(*[100] * 6, *[90] * 5))
    assert found == (
        "11, measured and predicted with bands; 6 within the 90% band, 10 would be expected: the "
        "band does not hold what the profile misses"
    )
    assert "measured and predicted with bands" in what and met == "yes"
    assert scripts.shown._curve(curve(*[100] * 9, 90, 90))[1].endswith("10 would be expected")
    assert scripts.shown._curve([])[1:] == ("not measured", "**no**, 11 short")
    wide = scripts.shown._curve(curve(*[100] * 6, *[90] * 5), 0.1)[1]
    assert wide.endswith("11 once it is widened by what other measurements missed")


def test_a_band_is_widened_by_what_other_measurements_missed(scripts):
    judge = scripts.judge
    others = {"measurements": [{"step_median": x} for x in (0.02, 0.01, 0.16)]}
    # Of a normal distribution half lies within 0.6745 standard deviations, 90% within 1.645.
    miss = judge.usual_miss(others)
    assert miss == pytest.approx(0.02 / 0.6744898) and judge.usual_miss(None) == 0
    assert judge.usual_miss({"measurements": []}) == 0
    [row] = curve(94.9, half=5.0)
    assert judge.band(row) == (95, 105) and not judge.is_inside(row)
    # About the same middle, in logarithms; the prediction need not lie there.
    row |= {"low": 80.0, "high": 95.0}
    low, high = judge.band(row, miss)
    assert low * high == pytest.approx(80 * 95)
    wide = math.hypot(math.log(95 / 80) / 2, 1.6448536 * miss)
    assert math.log(high / low) / 2 == pytest.approx(wide)
    assert not judge.is_inside(row | {"measured_tokens_per_s": 95.5})
    assert judge.is_inside(row | {"measured_tokens_per_s": 95.5}, miss)
    [_, _, row] = curve(1, 2, 101)
    assert judge.band(row | {"low": 100.0, "high": 100.0}, 0.01)[0] == pytest.approx(98.368592)
    assert (judge.Coverage.of(curve(94.9, 94), miss).inside, judge.Coverage.of(
        curve(94.9, 94)).inside) == (2, 0)  # fmt: skip
    text = scripts.report._curve([row | {"measured_low": 99.0, "probability_best": 1.0}], miss)
    assert any("a standard deviation of 3.0%" in line for line in text)


def test_drawn_points_that_fetch_are_said_to_be_off_to_one_side(scripts):
    def fetches(i, share, error):
        op = {"fetch_kv": {"measured_s": share}} if share else {}
        return point(f"decode-1-{i}", 1.0, 1.0 + error) | {"ops": op, "error": error}

    shares = (0, 0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.8)
    some = [fetches(i, share, 0.01 - 0.04 * share) for i, share in enumerate(shares)]
    [said, _] = scripts.report._fetching(some)
    assert "The errors of the 9 drawn decode points of m have a trend" in said
    assert "leans to too fast" in said
    assert "All 3 drawn points that fetch KV for 50% of a step or more are predicted too" in said
    assert "fast, by 1.0% to 2.2%" in said
    # What is not there is not said; nor of the curve's points, which differ in ω alone.
    assert scripts.report._fetching([p | {"name": "omega-0.1"} for p in some]) == []
    mixed = [fetches(i, 0.6, (-1) ** i * 0.01) for i in range(9)]
    assert scripts.report._fetching(mixed) == []


def test_code_that_was_changed_after_the_runs_were_seen_is_said_to_be(scripts, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    path = folder / "first.json"
    first = json.loads(path.read_text(encoding="utf-8"))

    def said(**more):
        path.write_text(json.dumps(first | more), encoding="utf-8")
        kept = scripts.kept.Kept(folder)
        return " ".join(scripts.shown.summary(kept)), scripts.report.report(folder)

    changed, blind = "The code was changed after these runs had been", "The points were drawn blind"
    for text in said():
        assert f"{blind}, and these are the predictions that were made first." in text
        assert changed not in text
    # One point that is predicted otherwise will do, though the median is the same.
    name = next(iter(first["errors"]))
    was = {"errors": first["errors"] | {name: first["errors"][name] + 0.001}, "step_worst": 0.0345}
    for text in said(**was):
        assert f"{blind}. {changed} seen. By the code before, steps were predicted to" in text
        assert f"{first['step_median']:.1%} in the median and 3.5% at worst, and op" in text
    assert "By the code of today, as above, it is " in said(**was)[1]
    # Who changes the code makes predictions anew: what was found first stays.
    scripts.predict.main([str(folder)])
    assert json.loads(path.read_text(encoding="utf-8")) == first | was
    # Without it nobody knows.
    path.unlink()
    kept = scripts.kept.Kept(folder)
    assert "what was predicted first is not known" in " ".join(scripts.shown.summary(kept))
    # The same code that ran the points says so.
    measured = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    measured["machine"]["code"] = first["code"]
    (folder / "measured.json").write_text(json.dumps(measured), encoding="utf-8")
    assert "made first, by the code that ran the points." in said()[0]


def test_what_was_predicted_first_is_what_is_predicted_without_predictions(
    scripts, tmp_path, monkeypatch
):
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    kept = scripts.kept.Kept(folder)
    predicted = kept.predicted
    (folder / "first.json").unlink()
    with pytest.raises(mg.InvalidInput, match=r"first.json is missing, and predicted.json is not"):
        kept.write(predicted)
    (folder / "predicted.json").unlink()
    kept = scripts.kept.Kept(folder)
    assert kept.first is None and kept.predicted is None
    monkeypatch.setattr(scripts.kept, "code", lambda: "abc")
    kept.write(predicted)
    assert kept.first == {"code": "abc", **scripts.judge.errors(predicted["points"])}
    assert kept.predicted == predicted  # read anew


def test_what_notes_of_the_profile_mean_stands_once(scripts, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(scripts.kept.RESULTS, folder)
    path = folder / "profile_notes.json"
    data = json.loads(path.read_text(encoding="utf-8"))

    def said(*notes):
        path.write_text(json.dumps(data | {"notes": notes}), encoding="utf-8")
        return scripts.report.report(folder)

    text = said("m: there was no time left for 2 points", "n: there was no time left for 3 points",
                "what nobody knows")  # fmt: skip
    # Behind the last of its kind.
    assert text.count("*So*: tasks of these ops") == 1 and "- what nobody knows.\n" in text
    assert text.index("n: there was no") < text.index("*So*") < text.index("what nobody knows")
    assert "## What the profile notes" not in said()


def test_words_of_the_report_are_told(scripts):
    text = scripts.report.REPORT.read_text(encoding="utf-8")
    words = text.partition("## Words")[2].partition("\n## ")[0]
    for word in ("seed", "wave", "tau", "regret", "issuing thread", "slope", "roofline", "band"):
        assert f"- **{word}" in words, word


def test_pictures_say_what_is_in_them(scripts):
    import matplotlib.pyplot as plt
    import pandas as pd

    kept = scripts.kept.Kept()
    if kept.predicted is None:
        pytest.skip("nothing has been predicted yet")
    left, right = scripts.draw.predicted_and_measured(kept.predicted["points"])
    said = [t.get_text() for t in left.get_legend().get_texts()]
    assert said[-2:] == ["filled: drawn at random", "empty: curve over ω, planner's choice"]
    left, right = scripts.draw.curve(pd.DataFrame(kept.predicted["curve"]))
    assert left.get_ylim()[0] > 0 and "does not start at 0" in left.get_title(loc="left")
    c = scripts.judge.Coverage.of(kept.predicted["curve"])
    assert f"{c.inside} of {c.n} in the band, {c.expected} exp" in right.get_title(loc="left")
    plt.close("all")


def test_mean_and_median_steps_that_differ_are_named(scripts):
    apart = {"error": 0.05, "period_error_s": -0.02, "measured_period_s": 1.25}
    same = {"error": -0.01, "period_error_s": -0.02, "measured_period_s": 1.0}
    points = [point("a", 1.0, 1.05) | apart, point("b", 1.0, 0.99) | same]
    lines = scripts.report._disturbed(points)
    assert [x for x in lines if x.startswith("-")] == [
        "- m a: a step took 1000.0 ms in the median and 1250.0 ms in the mean"
    ]
    assert scripts.report._disturbed(points[1:]) == []


def test_in_each_situation_other_things_bind(scripts):
    """And every op that does something is held back in one of them."""
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=scripts.situations.LAYERS)
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name("h200"))
    binding, held, working = {}, set(), set()
    for situation in scripts.situations.SITUATIONS:
        g = situation.graph(model)
        ops = situation.held_back(g)
        assert situation.ops is None or set(ops) == set(situation.ops)
        # Where steps are short, enough of them that a disturbed one does not show.
        assert (situation.steps, situation.rounds) == (9 if situation.kept else 5, 4)
        df = mg.delay_slopes(g, cost, ops, share=situation.share)
        binding[situation.name] = set(df["op"][df["binds"]])
        held |= set(ops)
        working |= {t.id.op for t in g if not t.work.empty}
        copied = sum(t.work.h2d_bytes for t in g if t.id.op in ("copy_dense", "copy_expert"))
        weights = sum(layer.weight_bytes for layer in model.layers)
        assert copied == pytest.approx(0 if situation.kept else weights, rel=0.01)
    assert held == working
    assert binding["copied"] == {"copy_dense", "copy_expert"}
    chain = {"pre_attn", "post_attn", "route", "copy_counts", "expert", "combine"}
    assert binding["kept, CPU"] >= chain | {"send_qkv", "attn_cpu", "recv_attn"}
    assert binding["kept, GPU"] >= chain - {"combine"} | {"fetch_kv", "attn_gpu"}


# The whole way, on CPU lanes.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Raw results and what is kept of them, of tiny models."""
    pytest.importorskip("torch")
    raw, folder = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("made") / "results"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, FOLDER / "stand_in.py", raw, folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return raw, folder


@pytest.mark.cpu
def test_every_point_is_predicted(scripts, made):
    kept = scripts.kept.Kept(made[1])
    points, curve = kept.predicted["points"], kept.predicted["curve"]
    names = {(p["model"], p["name"]) for p in points}
    assert ("tiny", "decode-1-0") not in names  # it had failed
    assert {m for m, _ in names} == {"tiny", "tiny-latent"} and len(names) == len(points) == 17
    assert len(scripts.judge.held_out(points)) == 5
    for p in points:
        often = 3 if p["name"].startswith(("omega-", "planned")) else 2
        assert len(p["runs_s"]) == often and p["measured_s"] == min(p["runs_s"])
        assert p["spread"] == pytest.approx(max(p["runs_s"]) / min(p["runs_s"]) - 1)
        assert p["error"] == pytest.approx(p["predicted_s"] / p["measured_s"] - 1)
        assert list(p["parts"]) == PARTS
        total_s = sum(p["parts"].values())
        assert abs(total_s - p["period_error_s"]) <= 1e-9 * p["measured_period_s"]
        # Steps of the median and of the mean differ by what the machine makes of them.
        assert 0.2 < p["measured_period_s"] / p["measured_s"] < 5
    assert [row["omega"] for row in curve] == [i / 10 for i in range(11)]
    assert sum(row["probability_best"] for row in curve) == pytest.approx(1)
    assert all(row["low"] <= row["tokens_per_s"] <= row["high"] for row in curve)
    [a] = [p for p in points if p["name"] == "omega-0.3"]
    assert curve[3]["measured_tokens_per_s"] == pytest.approx(32 / a["measured_s"])


@pytest.mark.cpu
def test_what_is_kept_is_what_was_measured_without_the_first_step(scripts, made):
    import gzip

    raw, folder = made
    kept = scripts.kept.Kept(folder)
    run = kept.measured["points"][0]
    text = gzip.decompress((raw / f"{run['timeline']}.gz").read_bytes())
    whole = mg.Timeline.from_dict(json.loads(text))
    timeline = kept.timeline(run)
    assert len(timeline.steps) == len(whole.steps) - 1
    assert timeline.shapes == whole.shapes[1:]
    of = [whole.row[i._replace(step=i.step + 1)] for i in timeline.ids]
    np.testing.assert_allclose(timeline.start_s, whole.start_s[of], atol=1e-7)
    np.testing.assert_allclose(timeline.end_s, whole.end_s[of], atol=1e-7)
    np.testing.assert_allclose(run["step_end_s"], whole.step_end_s[1:], atol=1e-7)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3e6


@pytest.mark.cpu
def test_op_times_are_those_of_the_tasks(scripts, made):
    """Against the timeline's own frame: of each task the median over the steps that count."""
    kept = scripts.kept.Kept(made[1])
    p = kept.predicted["points"][0]
    [run] = [r for r in kept.measured["points"] if r["name"] == p["name"] and r["run"] == p["run"]
             and r["model"] == p["model"]]  # fmt: skip
    timeline = kept.timeline(run)
    frame = timeline.to_frame()
    frame = frame[frame["step"].isin(timeline.counted_steps)]
    each = frame.groupby(["op", "layer", "microbatch", "expert"])["duration_s"].median()
    for op, seconds in each.groupby("op").sum().items():
        assert p["ops"][op]["measured_s"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.cpu
def test_predictions_are_the_same_again(scripts, made):
    kept = scripts.kept.Kept(made[1])
    close(json.loads(json.dumps(scripts.predict.predict(kept))), kept.predicted)


@pytest.mark.cpu
def test_report_of_what_was_made(scripts, made, tmp_path):
    text = scripts.report.report(made[1])
    for heading in ("What it must show", "Points", "Ops", "Parts of the error", "Delays"):
        assert f"## {heading}\n" in text
    assert (
        "| 1. at least 24 held-out points | 5, of tiny and tiny-latent | **no**, 19 short |" in text
    )
    assert "- tiny decode-1-0: a run hung or broke off" in text
    assert "on CPU lanes" in text
    for where in ("stay on the GPU", "are copied"):
        assert f"- weights {where}, attention on both: B = 16, b_a = 64, 2 slots for KV, 4" in text
        assert f"| weights {where}, attention on both | `attn_cpu` | CPU | 2 |" in text
    found = json.loads((made[1] / "slopes.json").read_text(encoding="utf-8"))
    assert [(s["steps"], s["rounds"]) for s in found["situations"]] == [(6, 2)] * 2
    assert " of 5, in 2 situations" in text
    # Where slopes were not come to, all else is there, and it says so.
    less = tmp_path / "less"
    shutil.copytree(made[1], less)
    (less / "slopes.json").unlink()
    text = scripts.report.report(less)
    assert "They have not been measured." in text
    assert "| 3. slopes agree in sign for all classes | not measured | **no** |" in text


# The stages of a measurement, each a process that may break off.


@pytest.fixture
def staged(scripts, tmp_path, monkeypatch):
    """Runs `measure.py` with made-up stages: of each what it writes, and the code it ends with."""
    pytest.importorskip("torch")
    import measure

    def run(*ends):
        left, began = list(ends), []

        def child(command, **_):
            began.append(command[command.index("--stage") + 1])
            now, code = left.pop(0)
            if isinstance(code, Exception):
                raise code
            if now is not None:
                (tmp_path / "now.json").write_text(json.dumps({"model": "m", "point": now}))
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(measure.subprocess, "run", child)
        monkeypatch.setattr(measure, "MODELS", {"m": (1, 1, 1, 8)})
        measure.main([str(tmp_path), "--models", "m"])
        assert not left
        return began

    run.out = tmp_path
    return run


@pytest.mark.cpu
@pytest.mark.parametrize("end", [1, subprocess.TimeoutExpired("measure.py", 165)], ids=str)
def test_without_a_profile_nothing_else_is_begun(staged, end):
    with pytest.raises(SystemExit, match="profile was not measured in 170 s.*with --profile-s"):
        staged((None, end))
    assert not (staged.out / "measured.json").exists()


@pytest.mark.cpu
def test_a_stage_that_ends_before_its_first_point_says_so(staged, capsys):
    """An older now.json was booked as what had failed."""
    (staged.out / "now.json").write_text(json.dumps({"model": "m", "point": "old"}))
    assert staged((None, 0), (None, 1), (None, 0)) == ["profile", "points", "slopes"]
    assert "points m ended with 1 before it began a point" in capsys.readouterr().out
    assert not (staged.out / "measured.json").exists()


@pytest.mark.cpu
def test_a_profile_that_is_there_is_gone_on_with(staged, scripts, capsys):
    """Points rest on it; another one would be of another moment, or of another machine."""
    shutil.copy(scripts.kept.RESULTS / "profile.json", staged.out)
    assert staged((None, 0), (None, 0)) == ["points", "slopes"]
    assert "has a profile.json, which is gone on with" in capsys.readouterr().out
    (staged.out / "profile.json").write_text("{")
    with pytest.raises(mg.InvalidInput, match="profile.json"):
        staged()


@pytest.mark.cpu
def test_points_of_another_machine_or_seed_are_not_gone_on_with(scripts):
    pytest.importorskip("torch")
    import measure

    args = SimpleNamespace(device="cpu", seed=7, out="OUT")
    data = measure._same_machine(args, {"points": [], "failed": [], "seed": 3})
    assert data["seed"] == 7 and data["machine"]["code"] == scripts.kept.code()
    data["points"] = [{}]
    assert measure._same_machine(args, data) is data
    other_day = data | {"machine": data["machine"] | {"date": "2020-01-01"}}
    assert measure._same_machine(args, other_day) is other_day
    for more, says in (
        ({"seed": 8}, "OUT has points of seed 8, and here it is 7"),
        (
            {"machine": data["machine"] | {"gpu": "another"}},
            "of gpu another, and here it is no GPU",
        ),
        ({"machine": data["machine"] | {"code": "0" * 12}}, "of code 000000000000, and here"),
    ):
        with pytest.raises(mg.InvalidInput, match=f"{says}.*: one measurement is of one machine"):
            measure._same_machine(args, data | more)


@pytest.mark.cpu
def test_an_archive_in_the_folder_is_not_in_itself(scripts, tmp_path):
    import zipfile

    pytest.importorskip("torch")
    import measure

    (tmp_path / "profile.json").write_text("{}")
    args = SimpleNamespace(out=tmp_path, zip=tmp_path / "all.zip")
    for _ in range(2):
        measure._archive(args)
        with zipfile.ZipFile(args.zip) as z:
            assert z.namelist() == ["profile.json"]


@pytest.mark.cpu
def test_a_point_that_hung_is_left_out_and_the_stage_begun_again(staged, capsys):
    began = staged((None, 0), ("decode-1", 1), (None, 0), (None, 1))
    assert began == ["profile", "points", "points", "slopes"]
    said = capsys.readouterr().out
    assert "points m ended with 1 at decode-1" in said and "slopes m ended with 1" in said
    failed = json.loads((staged.out / "measured.json").read_text())["failed"]
    assert failed == [{"model": "m", "point": "decode-1"}]
