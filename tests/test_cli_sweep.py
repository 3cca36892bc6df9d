"""``moegen sweep``: ranges and lists, the table, files, exit codes."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from fake_plan import Calls

import moegen as mg
from moegen.cli import main
from moegen.sim import sweep as module


@pytest.fixture
def calls(monkeypatch):
    found = Calls([])
    monkeypatch.setattr(module, "plan", found.plan)
    return found.calls


def run(capsys, line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    said = capsys.readouterr()
    return exit_.value.code, said.out, said.err


def fixed(calls) -> list[dict]:
    return [c[-1] for c in calls]


@pytest.mark.parametrize(
    ("flag", "name", "values"),
    [
        ("--omega 0:1:.25", "omega", [0, 0.25, 0.5, 0.75, 1]),
        ("--omega 0:.3:.1", "omega", [0, 0.1, 0.2, 0.3]),
        ("--omega 0:1:.4", "omega", [0, 0.4, 0.8]),
        ("--B 512,1024:2048:512", "B", [512, 1024, 1536, 2048]),
        ("--s-expert 1GiB:2GiB:512MiB", "s_expert", [2**30, 3 * 2**29, 2**31]),
        ("--fetch all,routed", "fetch", ["all", "routed"]),
    ],
)
def test_values_are_lists_and_ranges_with_both_ends(calls, capsys, flag, name, values):
    code, _, _ = run(capsys, f"sweep mixtral-8x7b --hw c2 {flag}")
    assert code == 0 and [f[name] for f in fixed(calls)] == values


def test_numbers_of_the_machine_and_of_the_workload(calls, capsys):
    line = "sweep mixtral-8x7b --hw c2 --n 100 --h2d 25GB/s,50GB/s --host-memory 1TB"
    line += " --vary cpu_attn_bytes_per_s=44GB/s --vary prompt_len=64,128"
    code, _, _ = run(capsys, line)
    assert code == 0 and len(calls) == 4
    machines, works = {c[1] for c in calls}, {c[2].groups for c in calls}
    assert {m.h2d_bytes_per_s for m in machines} == {25e9, 50e9}
    assert {(m.host_memory_bytes, m.cpu_attn_bytes_per_s) for m in machines} == {(1e12, 44e9)}
    assert works == {((64, 256, 100),), ((128, 256, 100),)}


def test_several_models_and_machines(calls, capsys):
    code, out, _ = run(capsys, "sweep mixtral-8x7b,deepseek-v2 --hw c1,c2 --omega .5")
    assert code == 0 and len(calls) == 4
    assert [c[0].name for c in calls] == 2 * ["mixtral-8x7b"] + 2 * ["deepseek-v2"]
    assert out.splitlines()[0].split()[:3] == ["omega", "model", "hw"]


def test_the_table_says_what_binds_what_does_not_fit_and_which_is_best(calls, capsys):
    code, out, err = run(capsys, "sweep mixtral-8x7b --hw c2 --omega 0,.6,1 --B 100,9000")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 8
    assert lines[1].split()[:3] == ["0", "100", "64.0"] and "link (weights and KV)" in lines[1]
    assert lines[2].endswith("does not fit host memory: 7 GiB too much")
    assert lines[5].endswith("90%  chain of one layer")
    assert lines[-1].endswith("at omega 0.6, B 100") and "soonest" in lines[-1]
    assert "moegen: warning: 3 of 6 points do not fit" in err


def test_files_and_json_have_every_column(calls, capsys, tmp_path):
    csv = tmp_path / "out.csv"
    code, out, _ = run(capsys, f"sweep mixtral-8x7b --hw c2 --B 100,9000 --json -o {csv}")
    found = json.loads(out)
    assert code == 0 and found["notes"] == ["1 of 2 points do not fit: the column error says why"]
    frame = mg.sweep(
        mg.ModelSpec.from_pretrained("mixtral-8x7b"),
        mg.HardwareSpec.from_name("c2"),
        mg.Workload.uniform(8500, 512, 256),
        B=[100, 9000],
    )
    first, second = found["points"]
    assert list(first) == list(frame.columns) and first["time_s"] == frame["time_s"][0]
    assert second["time_s"] is None and second["error"].startswith("does not fit")
    pd.testing.assert_frame_equal(
        pd.read_csv(csv).fillna({"error": "", "notes": ""}), frame, check_dtype=False
    )


def test_a_plot_is_drawn_of_one_or_two_parameters(calls, capsys, tmp_path):
    file = tmp_path / "plot.png"
    line = f"sweep mixtral-8x7b --hw c2 --plot {file}"
    assert run(capsys, f"{line} --omega 0:1:.5 --B 100,200,9000")[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    n = len(calls)
    for flags in ("--omega .5", "--fetch all,routed", "--omega 0,1 --B 1,2 --b-a 1,2"):
        code, _, err = run(capsys, f"{line} {flags}")
        assert code == 2 and "--plot needs one number with several values" in err
    assert run(capsys, f"{line}.docx --omega 0,1")[0] == 2
    assert len(calls) == n  # refused before anything is planned


def test_no_point_that_fits_is_infeasible(calls, capsys):
    code, out, err = run(capsys, "sweep mixtral-8x7b --hw c2 --B 8000,9000")
    assert code == 3 and "7 GiB too much" in out
    assert "moegen: no point fits; the first does not fit host memory" in err


def test_a_knob_without_effect_is_a_warning(calls, capsys):
    _, _, err = run(capsys, "sweep mixtral-8x7b --hw c2 --b-e 256,512 --omega 0,1")
    assert err.count("b_e has no effect") == 1 and "UserWarning" not in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "nothing is swept"),
        ("--omega 0,x", "--omega: 'x' is no number"),
        ("--omega 0:1", "--omega: '0:1' is no range: write FROM:TO:STEP"),
        ("--omega 0:1:0", "STEP must be above 0"),
        ("--omega 1:0:.1", "TO not below FROM"),
        ("--omega nan", "--omega: 'nan' is no number"),
        ("--B 1:1e9:1", "has 1000000000 values: at most 10000"),
        ("--B 0", "B must be a whole number of at least 1, got 0"),
        ("--h2d fast", "--h2d: 'fast' is not a size"),
        ("--h2d 0", "h2d_bytes_per_s must be finite and positive"),
        ("--schedule flexgen", "schedule 'flexgen' is not there; known: module"),
        ("--vary omega", "--vary takes NAME=VALUES, got 'omega'"),
        ("--vary omega=1", "--vary omega=1: it has a flag of its own: --omega 1\n"),
        (
            "--vary h2d_bytes_per_s=25e9,50e9",
            "--vary h2d_bytes_per_s=25e9,50e9: it has a flag of its own: --h2d 25e9,50e9\n",
        ),
        ("--vary n=1 --vary n=2", "--vary n: give its values once, with --vary n\n"),
        ("--vary bogus=1", "there is no parameter 'bogus' to sweep"),
        ("--omega 1 --hw c9", "--hw: 'c9' is no file"),
    ],
)
def test_bad_usage_exits_2(calls, capsys, flags, said):
    code, _, err = run(capsys, f"sweep mixtral-8x7b --hw c2 {flags}")
    assert code == 2 and said in err, err
    assert not calls
