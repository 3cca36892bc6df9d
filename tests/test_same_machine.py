"""A run is predicted from what was measured on its own machine, or it is said that it is not."""

from __future__ import annotations

import warnings

import pytest
from handmade import as_measured
from small_models import mixtral

import moegen as mg
from moegen.graph.hardware import CPU_LANES
from moegen.graph.profile_table import ProfileTable
from moegen.sim.cost import CostModel
from moegen.timeline import Timeline

S = mg.Strategy(B=4, b_a=2, b_e=8, omega=0.5)
GRAPH = mg.build(mixtral(), S, kv_len=20)
H200 = ProfileTable.from_name("h200").machine
PROFILE = CostModel.from_profile("h200")
RATES = CostModel.roofline(H200)
THERE = {"gpu_name": H200.gpu_name, "cpu_name": H200.cpu_name}
HERE = {"gpu_name": CPU_LANES, "cpu_name": "Xeon Silver 4310, 2 cores"}


def run(**meta) -> Timeline:
    return as_measured(mg.simulate(GRAPH, RATES, steps=3), **meta)


ASKED = {
    "compare": lambda cost, real: mg.compare(cost, real),
    "what_if": lambda cost, real: mg.what_if(real, cost, link="x2"),
    "what_ifs": lambda cost, real: mg.what_ifs(real, cost, [{"link": "x2"}]),
    "corrected": lambda cost, real: cost.corrected(real),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("cost", [PROFILE, RATES], ids=["profile", "rates"])
def test_what_is_of_another_machine_is_warned_about(ask, cost):
    said = rf"the GPU there is '{H200.gpu_name}' and the run's is 'none .*moegen profile"
    with pytest.warns(UserWarning, match=said):
        assert ask(cost, run(device="cpu")) is not None
    with pytest.warns(UserWarning, match="the CPU there is .* and the run's is 'Xeon Silver 4310"):
        ask(cost, run(machine=HERE))


@pytest.mark.parametrize(
    "meta",
    [
        {"machine": THERE},
        {"machine": {"gpu_name": H200.gpu_name.removeprefix("NVIDIA ")}, "device": "cuda"},
        # A timeline that does not say, or says nothing that can be read.
        {},
        {"device": "cuda"},
        {"machine": None},
        {"machine": ["h200"], "date": 5},
        {"machine": {"gpu_name": 3}},
    ],
)
@pytest.mark.parametrize("cost", [PROFILE, RATES, mg.simulate(GRAPH, RATES, steps=3)])
def test_the_same_machine_and_one_that_is_not_known_are_no_matter(cost, meta):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c = mg.compare(cost, run(**meta))
    assert str(c) and c._repr_html_() and c.to_dict()["predicted_from"]


def test_a_profile_of_cpu_lanes_is_none_of_a_gpu():
    lanes = CostModel.roofline(H200.with_(gpu_name=CPU_LANES))
    with pytest.warns(UserWarning, match="the GPU there is 'none .CPU lanes.' and the run's is"):
        mg.compare(lanes, run(machine=THERE))


def test_a_prediction_in_a_file_knows_its_machine(tmp_path):
    mg.simulate(GRAPH, PROFILE, steps=3).save(tmp_path / "p.json")
    predicted = Timeline.load(tmp_path / "p.json")
    assert predicted.meta["machine"] == THERE
    with pytest.warns(UserWarning, match="the prediction is of another machine than the run"):
        mg.compare(predicted, run(machine=HERE))


def test_what_wraps_a_profile_is_of_its_machine():
    corrected = PROFILE.corrected(run(machine=THERE))
    with pytest.warns(UserWarning, match="another machine"):
        mg.compare(corrected, run(machine=HERE))
    assert mg.simulate(GRAPH, corrected).meta["rests_on"] == (
        f"the profile of {H200.name}, measured {PROFILE.table.date}"
    )
    assert "machine" not in mg.simulate(GRAPH, CostModel.fixed({t.id: 1.0 for t in GRAPH})).meta


def test_a_comparison_says_what_it_rests_on():
    c = mg.compare(PROFILE, run(machine=THERE, date="2026-11-28"))
    machine = f"{H200.gpu_name}; {H200.cpu_name}"
    assert c.predicted_from == (
        f"the profile of {H200.name}, measured {PROFILE.table.date} ({machine})"
    )
    assert c.measured_on == f"{machine}, 2026-11-28"
    first, shares, last = str(c).splitlines()[-3:]
    assert first == f"Predicted from {c.predicted_from}" and last == f"Measured on {c.measured_on}"
    assert "% of task time" in shares
    data = c.to_dict()
    assert sum(data["provenance"].values()) == pytest.approx(1.0)
    assert (data["predicted_from"], data["measured_on"]) == (c.predicted_from, c.measured_on)
    assert c.measured_on in c._repr_html_()
    unknown = mg.compare(RATES, run())
    assert str(unknown).endswith("Measured on a machine that the timeline does not name")
    assert unknown.predicted_from.startswith(f"the rates of {H200.name} (")
    assert unknown.to_dict()["measured_on"] is None


def test_rates_stand_beside_the_times_that_they_are_of():
    lines = str(mg.compare(RATES.corrected(run()), run())).splitlines()
    rates = ["predicted", "rate", "measured", "rate"]
    (head,) = (line for line in lines if line.startswith("resource"))
    assert head.split() == ["resource", "a", "step", "predicted", "measured", "error", *rates]
    row = next(line for line in lines if line.startswith("h2d"))
    cells = [x for x in row.split("  ") if x.strip()]
    assert cells[2].strip() == cells[3].strip() and cells[4].strip() in ("+0.0%", "-0.0%")
    assert cells[5].strip() == cells[6].strip() and cells[5].endswith("GB/s")
