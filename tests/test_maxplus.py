"""Many points at once against the simulator, to the last digit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from handmade import edge, join, random_durations, random_graph, task

from moegen.errors import DeadlockError, GraphError, InvalidInput
from moegen.graph.build import build
from moegen.graph.hardware import HardwareSpec
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy
from moegen.graph.task import TaskGraph
from moegen.sim import maxplus
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate
from moegen.sim.maxplus import Compiled


def test_five_tasks_join_at_two_points():
    graph, durations = join()
    compiled = Compiled(graph)
    # As in the simulator's test; with a `d` of 10 instead, it ends at 12 and e at 13.
    a, b, c, d, e = (durations[t.id.op] for t in graph)
    ends = compiled.ends([[a, b, c, d, e], [a, b, c, 10, e]])
    assert ends.tolist() == [[2, 3, 7, 6.5, 8], [2, 3, 7, 12, 13]]
    assert compiled.makespan([[a, b, c, d, e], [a, b, c, 10, e]]).tolist() == [8, 13]
    assert compiled.ends([a, b, c, d, e]).tolist() == [2, 3, 7, 6.5, 8]
    assert compiled.makespan([a, b, c, d, e]) == 8


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_equal_to_the_simulator_to_the_last_digit(steps, monkeypatch):
    monkeypatch.setattr(maxplus, "_BLOCK", 3)  # so that points go through several blocks
    rng = np.random.default_rng(31)
    for _ in range(40):
        graph = random_graph(rng)
        compiled = Compiled(graph, steps)
        costs = [CostModel.fixed(random_durations(rng, graph)) for _ in range(5)]
        points = np.array([compiled.seconds(c) for c in costs])
        ends, makespan = compiled.ends(points), compiled.makespan(points)
        period = compiled.period(points)
        for i, cost in enumerate(costs):
            run = simulate(graph, cost, steps=steps, shared=False)
            assert ends[i].tolist() == run.end_s.tolist()
            assert makespan[i] == run.makespan_s
            assert period[i] == run.period_s


def test_a_graph_built_has_its_durations_and_those_of_single_steps():
    model = ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=3)
    s = Strategy(B=64, b_a=16, b_e=256, s_expert=4 * model.expert_bytes, omega=0.5)
    graph = build(model, s, kv_len=640)
    compiled = Compiled(graph, steps=3)
    machines = [HardwareSpec.from_name(name) for name in ("c1", "c3", "h200")]
    costs = [CostModel.roofline(hw) for hw in machines]
    points = np.array([compiled.seconds(cost) for cost in costs])
    for point, cost in zip(points, costs, strict=True):
        assert point.tolist() == 3 * [cost.seconds(t) for t in graph]
    runs = [simulate(graph, cost, 3, shared=False) for cost in costs]
    assert compiled.ends(points).tolist() == [run.end_s.tolist() for run in runs]
    # Steps may differ: no copies in the second one.
    first, second, third = points[0].reshape(3, -1).copy()
    second[[t.lane == "BULK" for t in graph]] = 0.0
    given = dict(zip(runs[0].ids, [*first, *second, *third], strict=True))
    alone = simulate(graph, CostModel.fixed(given), 3, shared=False)
    assert compiled.ends([*first, *second, *third]).tolist() == alone.end_s.tolist()


def test_a_faster_task_never_makes_anything_end_later():
    rng = np.random.default_rng(32)
    sooner = 0
    for _ in range(40):
        graph = random_graph(rng)
        compiled = Compiled(graph, steps=3)
        point = compiled.seconds(CostModel.fixed(random_durations(rng, graph)))
        faster = point * rng.uniform(0, 1, (20, len(point)))
        faster[:10][rng.random((10, len(point))) < 0.8] = 0.0
        assert (compiled.ends(faster) <= compiled.ends(point)).all()
        one = np.where(np.eye(len(point), dtype=bool), point * 0.5, point)
        assert (compiled.ends(one) <= compiled.ends(point)).all()
        sooner += int((compiled.makespan(one) < compiled.makespan(point)).sum())
    assert sooner > 100


def test_no_points_are_no_times():
    graph, _ = join()
    assert Compiled(graph).ends(np.empty((0, 5))).shape == (0, 5)
    assert Compiled(graph).makespan(np.empty((0, 5))).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_durations_must_be_finite_and_not_negative(bad):
    graph, _ = join()
    with pytest.raises(InvalidInput, match="finite and not negative"):
        Compiled(graph).ends([[1, 1, 1, 1, 1], [1, 1, bad, 1, 1]])


def test_wrong_shapes_and_graphs_are_refused():
    graph, _ = join()
    with pytest.raises(InvalidInput, match=r"shape \[4\].*\[points, 10\]"):
        Compiled(graph, steps=2).ends([1, 1, 1, 1])
    with pytest.raises(GraphError, match="steps=2"):
        Compiled(graph.unroll(2))
    with pytest.raises(InvalidInput, match="at least 1"):
        Compiled(graph, steps=0)
    stuck = TaskGraph((task("early", "GPU"), task("late", "GPU")), (edge("late", "early"),))
    with pytest.raises(DeadlockError, match="decode:early.s0, decode:late.s0"):
        Compiled(stuck)
