"""What a simulated timeline remembers of its costs; runs of steps that differ."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from handmade import as_measured, join, random_demands, random_durations, random_graph, times
from small_models import mixtral

import moegen as mg
from moegen.errors import InvalidInput
from moegen.graph.shape import Shape
from moegen.sim.cost import CostModel
from moegen.timeline import Timeline

S = mg.Strategy(B=4, b_a=2, b_e=8, omega=0.5)


@pytest.fixture(scope="module")
def graph():
    return mg.build(mixtral(), S, phase="decode", kv_len=20)


@pytest.fixture(scope="module")
def cost():
    return CostModel.roofline(mg.HardwareSpec.from_name("h200"))


def same(a: Timeline, b: Timeline) -> bool:
    return np.array_equal(a.start_s, b.start_s) and np.array_equal(a.end_s, b.end_s)


def test_its_costs_bring_the_run_back(graph, cost):
    run = mg.simulate(graph, cost, steps=3)
    assert same(mg.simulate(graph, run.cost, steps=3), run)
    task = next(t for t in graph if t.id.op == "copy_expert")
    assert run.cost.estimate(task) == cost.estimate(task)


def test_they_are_saved_with_it(graph, cost, tmp_path):
    run = mg.simulate(graph, cost, steps=3)
    run.save(tmp_path / "t.json")
    loaded = Timeline.load(tmp_path / "t.json")
    assert same(mg.simulate(loaded.graph, loaded.cost, steps=3), run)
    for used in ({"h2d"}, {"d2h"}, {"h2d", "d2h"}):
        rates, known = cost.capacities(used), loaded.cost.capacities(used)
        assert {r: known[r] for r in rates} == dict(rates)
    # One cost a kind and one number a task of a step, however many steps.
    saved = json.loads((tmp_path / "t.json").read_text())["cost"]
    assert len(saved["kinds"]) == len(graph) and len(saved["costs"]) == len(graph.kinds[0])
    assert loaded.to_dict() == run.to_dict()


def test_random_runs_come_back_from_their_files(tmp_path):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        g = random_graph(rng)
        given = CostModel.fixed(
            random_durations(rng, g),
            demands=random_demands(rng, g),
            capacities={"h2d": 1.0, "d2h": 1.0, "host_memory": 2.0},
            duplex=0.7,
        )
        for shared in (True, False):
            run = mg.simulate(g, given, steps=3, shared=shared)
            run.save(tmp_path / "t.json")
            loaded = Timeline.load(tmp_path / "t.json")
            assert loaded.cost.shared is shared
            assert same(mg.simulate(g, loaded.cost, steps=3, shared=shared), run)


def test_a_saved_prediction_splits_as_the_one_in_memory(graph, cost, tmp_path):
    run = mg.simulate(graph, cost, steps=4)
    slow = mg.HardwareSpec.from_name("h200").with_(h2d_bytes_per_s=20e9, cpu_attn_flops=1e10)
    real = as_measured(mg.simulate(graph, CostModel.roofline(slow), steps=4))
    run.save(tmp_path / "t.json")
    one, other = mg.compare(run, real), mg.compare(Timeline.load(tmp_path / "t.json"), real)
    assert one.parts.equals(other.parts) and one.task_cost.equals(other.task_cost)
    assert one.parts["seconds"].sum() < 0


def test_a_measured_one_has_none(graph, cost, tmp_path):
    run = mg.simulate(graph, cost)
    real = Timeline(graph, run.ids, run.start_s, run.end_s, source="measured")
    real.save(tmp_path / "t.json")
    assert real.cost is None and Timeline.load(tmp_path / "t.json").cost is None


def test_a_task_of_another_graph_is_refused(graph, cost):
    other, _ = join()
    with pytest.raises(InvalidInput, match="no task of the run that the costs are of"):
        mg.simulate(graph, cost).cost.estimate(other.tasks[0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c.pop("kinds"),
        lambda c: c["kinds"].pop(),
        lambda c: c.update(kinds=[len(c["costs"])] * len(c["kinds"])),
        lambda c: c.update(kinds=[]),
        lambda c: c["costs"][0].pop(),
        lambda c: c["costs"].__setitem__(0, [-1.0, "given", {}]),
        lambda c: c.update(shared=1),
        lambda c: c.update(capacities={"h2d": 0}),
        lambda c: c.update(duplex={"gpu": 1.0}),
        lambda c: c.update(capacities=[1]),
    ],
)
def test_damaged_costs_are_refused(damage, graph, cost, tmp_path):
    data = mg.simulate(graph, cost, steps=2).to_dict()
    damage(data["cost"])
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match="^the timeline is damaged: the costs are damaged"):
        Timeline.load(tmp_path / "t.json")


# -- shapes ---------------------------------------------------------------------------------


def shapes(*lengths: int) -> list[Shape]:
    return [Shape.uniform(4, n, 1) for n in lengths]


def test_steps_alike_are_the_run_of_their_graph(graph, cost):
    alike = mg.simulate(graph, cost, shapes=shapes(50, 50, 50))
    assert same(alike, mg.simulate(graph.bind(shapes(50)[0]), cost, steps=3))
    assert alike.shapes == tuple(shapes(50, 50, 50))


@pytest.mark.parametrize("by_work", [True, False])
def test_each_step_costs_what_its_own_shape_does(graph, cost, by_work, monkeypatch):
    monkeypatch.setattr(type(cost), "by_work", by_work)
    lengths = (50, 500, 50, 3000)
    run = mg.simulate(graph, cost, shapes=shapes(*lengths), shared=False)
    for i, task_id in enumerate(run.ids):
        bound = graph.bind(shapes(lengths[task_id.step])[0])
        seconds = cost.seconds(bound[task_id._replace(step=0)])
        assert run.end_s[i] - run.start_s[i] == pytest.approx(seconds, rel=1e-9)
    assert same(mg.simulate(graph, run.cost, steps=4, shared=False), run)
    assert run.work_done[-1] == graph.bind(shapes(3000)[0]).tasks[-1].work


def test_durations_given_for_a_step_hold_in_that_step(graph):
    ops = {t.id.op for t in graph}
    late = {t.id._replace(step=1): 2.0 for t in graph}
    run = mg.simulate(
        graph, CostModel.fixed(dict.fromkeys(ops, 1.0) | late), shapes=shapes(5, 5), shared=False
    )
    lasted = (run.end_s - run.start_s).reshape(2, -1)
    assert (lasted[0] == 1.0).all() and np.allclose(lasted[1], 2.0)


def test_a_shape_a_step(graph, cost):
    with pytest.raises(InvalidInput, match="one shape a step: got 2 shapes for 3 step"):
        mg.simulate(graph, cost, 3, shapes=shapes(5, 5))
    with pytest.raises(InvalidInput, match="got 0 shapes"):
        mg.simulate(graph, cost, shapes=[])


def test_a_cost_model_predicts_what_each_step_worked_on(graph, cost):
    lengths = (10, 400, 800, 1200)
    run = mg.simulate(graph, cost, shapes=shapes(*lengths))
    real = Timeline(
        graph,
        run.ids,
        run.start_s,
        run.end_s,
        source="measured",
        meta={"shapes": [s.to_dict() for s in shapes(*lengths)]},
    )
    result = mg.compare(cost, real)
    assert result.error == 0 and result.by_op["error"].abs().max() < 1e-9
    assert result.parts["seconds"].abs().max() < 1e-12
    # The graph's own shape is another: what that changes is an error.
    assert mg.compare(mg.simulate(graph, cost, steps=4), real).error < -1e-3


def test_a_step_in_which_rows_ended_costs_less(graph, cost):
    live, ended = Shape.uniform(4, 9, 1), Shape((9,) * 4, (1, 1, 0, 0))
    run = mg.simulate(graph, cost, shapes=[live, ended], shared=False)
    lasted = dict(zip(run.ids, run.end_s - run.start_s, strict=True))
    gone = [i for i in lasted if i.op == "attn_gpu" and i.microbatch == 0]
    assert gone and all((lasted[i] > 0) == (i.step == 0) for i in gone)


def test_costs_are_the_same_after_a_change_of_the_machine(graph, cost):
    run = mg.simulate(graph, cost)
    hw = replace(cost.hw, launch_s=1.0)
    assert same(mg.simulate(graph, run.cost), run)
    assert not same(mg.simulate(graph, CostModel.roofline(hw)), run)


def test_hand_made_runs_remember_too():
    g, durations = join()
    run = mg.simulate(g, CostModel.fixed(durations))
    assert times(mg.simulate(g, run.cost)) == times(run)
