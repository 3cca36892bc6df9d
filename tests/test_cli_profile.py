"""``--profile``: what was measured, in place of rates, and whose it is."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

import moegen as mg
from moegen.cli import main
from moegen.graph.company import Company
from moegen.graph.hardware import HardwareSpec
from moegen.graph.profile_table import ProfileTable
from moegen.sim.measured import Measured

POINT = "mixtral-8x7b --B 256 --b-a 64 --omega 0.5"
JOB = "mixtral-8x7b --n 100 --B 100 --b-a 100 --omega 0.5"


def run(capsys, line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


@pytest.fixture
def mine(tmp_path):
    """A profile of a machine with a GPU of its own, on which copies disturb attention."""
    table = ProfileTable.from_name("h200")
    machine = table.machine.with_(name="mine", gpu_name="Mine", host_memory_bytes=300e9)
    less = Company("host_memory", "h2d", 0.5, "made up")
    others = [c for c in table.company if str(c) != str(less)]
    path = tmp_path / "mine.json"
    dataclasses.replace(table, machine=machine, company=(less, *others)).save(path)
    return path


def period_s(capsys, flags: str) -> float:
    code, out, err = run(capsys, f"simulate {POINT} {flags} --json")
    assert code == 0, err
    return json.loads(out)["period_s"]


def predicted_s(cost, hw="h200") -> float:
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    g = mg.build(model, mg.Strategy(B=256, b_a=64, b_e=8192, omega=0.5), kv_len=640)
    return mg.simulate(g, cost, steps=4).period_s


def test_simulate_takes_the_profiles_times_and_machine(capsys, mine):
    assert period_s(capsys, "--profile h200") == predicted_s(mg.CostModel.from_profile("h200"))
    assert period_s(capsys, "--profile h200 --hw h200") == period_s(capsys, "--profile h200")
    own = Measured(ProfileTable.load(mine))
    assert period_s(capsys, f"--profile {mine}") == predicted_s(own)
    assert predicted_s(own) > predicted_s(mg.CostModel.from_profile("h200"))
    roofline = predicted_s(mg.CostModel.roofline(HardwareSpec.from_name("h200")))
    assert period_s(capsys, "--hw h200") == roofline
    _, out, _ = run(capsys, f"simulate {POINT} --profile h200")
    assert "Durations: " in out and "measured" in out.splitlines()[-1]
    _, out, _ = run(capsys, f"simulate {POINT} --hw h200")
    assert "Durations" not in out


@pytest.mark.parametrize("command", ["simulate", "plan", "sweep"])
def test_a_profile_of_another_dtype_is_told(capsys, tmp_path, command):
    other = dataclasses.replace(ProfileTable.from_name("h200"), dtype="float32")
    other.save(tmp_path / "float32.json")
    line = f"{command} {POINT} --n 64 --prompt-len 64 --gen-len 8"
    line += " --kv-slots 2,3" if command == "sweep" else ""
    _, _, err = run(capsys, f"{line} --profile h200")
    assert "dtype" not in err and "measured in" not in err
    code, _, err = run(capsys, f"{line} --profile {tmp_path / 'float32.json'}")
    assert code == 0 and "the profile was measured in float32 and mixtral-8x7b is bfloat16" in err
    assert "moegen profile --dtype bfloat16" in err


def test_two_files_of_one_name_are_refused(capsys, tmp_path):
    file = tmp_path / "t.json"
    code, _, err = run(capsys, f"simulate {POINT} --hw c2 --trace {file} --timeline {file}")
    assert code == 2 and "is written: name another file" in err and not file.exists()


def test_plan_and_sweep_take_them_too(capsys, mine):
    model, work = mg.ModelSpec.from_pretrained("mixtral-8x7b"), mg.Workload.uniform(100, 512, 256)
    own = Measured(ProfileTable.load(mine))
    fixed = {"B": 100, "b_a": 100, "omega": 0.5}
    time_s = mg.plan(model, own.hw, work, own, **fixed).time_s
    code, out, err = run(capsys, f"plan {JOB} --profile {mine} --json")
    assert code == 0, err
    assert json.loads(out)["hardware"] == "mine" and json.loads(out)["time_s"] == time_s
    _, out, _ = run(capsys, f"plan {JOB} --profile {mine}")
    assert f"Profile  measured {own.table.date} on mine" in out
    for jobs in (1, 2):  # each process has the curves
        code, out, err = run(capsys, f"sweep {JOB} --profile {mine} --json --jobs {jobs}")
        assert code == 0, err
        assert [p["time_s"] for p in json.loads(out)["points"]] == [time_s]


def test_memory_may_be_swept_where_rates_may_not(capsys):
    code, out, _ = run(capsys, f"sweep {JOB} --profile h200 --host-memory 110GB,120GB --json")
    assert code == 0 and len(json.loads(out)["points"]) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"simulate {POINT} --profile h2000", "--profile: 'h2000' is no file, and none of h200"),
        (f"simulate {POINT} --profile h2000", "Make one of your machine: moegen profile -o FILE"),
        (f"plan {JOB} --profile H200", "'H200' is no file, and none of h200, what ships with mo"),
        (f"plan {JOB} --profile H200", "moegen. Write h200\n"),
        (f"plan {JOB} --profile {__file__}", "--profile: "),
        (f"plan {JOB} --profile h200 --hw c2", "H200' and here 'RTX A5000'"),
        (f"simulate {POINT} --profile h200 --hw c2", "Leave --hw out to take the machine of"),
        (f"sweep {JOB} --profile h200 --hw c1,h200", "--profile is of one machine: --hw c1,h200"),
        (f"sweep {JOB} --profile h200 --h2d 5GB/s,9GB/s", "leave --h2d out"),
        (f"sweep {JOB} --profile h200 --vary launch_s=1e-5", "leave --vary launch_s out"),
        (
            f"sweep {JOB} --profile h200 --vary h2d_bytes_per_s=5e9,9e9",
            "its own: --h2d 5e9,9e9, with --hw alone: --profile h200 does not know another rate",
        ),
    ],
)
def test_what_a_profile_cannot_be_taken_for_is_refused(capsys, line, says):
    code, out, err = run(capsys, line)
    assert (code, out) == (2, "") and says in err and "Traceback" not in err and "hw=" not in err


def test_a_sweep_of_what_was_measured_rests_on_it():
    """A cost model of the machine's own measurements is not its roofline."""
    hw, cost = HardwareSpec.from_name("h200"), mg.CostModel.from_profile("h200")
    model, work = mg.ModelSpec.from_pretrained("mixtral-8x7b"), mg.Workload.uniform(64, 512, 64)
    fixed = {"B": 64, "b_a": 64, "omega": 0.5}
    swept = mg.sweep(model, cost.hw, work, cost, **fixed)["time_s"].item()
    assert swept == mg.plan(model, cost.hw, work, cost, **fixed).time_s
    assert swept != mg.plan(model, hw, work, **fixed).time_s


def test_a_measured_cost_goes_to_other_processes():
    cost = mg.CostModel.from_profile("h200")
    again = pickle.loads(pickle.dumps(cost))
    assert again.table == cost.table and predicted_s(again) == predicted_s(cost)


def test_a_few_layers_are_simulated_as_bench_runs_them(capsys):
    few = "simulate mixtral-8x7b --profile h200 --B 1024 --b-a 64 --omega 0.7"
    code, out, _ = run(capsys, f"{few} --layers 4 --json")
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=4)
    s = mg.Strategy(B=1024, b_a=64, b_e=8192, omega=0.7)
    g = mg.build(model, s, kv_len=(2 * 512 + 256) // 2)
    expected = mg.simulate(g, mg.CostModel.from_profile("h200"), steps=4).period_s
    assert code == 0 and json.loads(out)["period_s"] == pytest.approx(expected)
    code, _, err = run(capsys, f"{few} --layers 40")
    assert code == 2 and "--layers: " in err and "32" in err
