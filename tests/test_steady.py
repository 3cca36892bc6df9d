"""The period of a repeated step and its sensitivities, against unrolling and all cycles."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from handmade import edge, random_durations, random_graph, task, tid

import moegen as mg
from moegen.errors import DeadlockError, GraphError
from moegen.graph.passes import assemble, with_slots
from moegen.graph.task import EdgeKind, Ring, TaskGraph
from moegen.sim.cost import CostModel
from moegen.sim.maxplus import Compiled
from moegen.sim.steady import steady


def long_run_s(graph: TaskGraph, points, lap: int = 60, before: int = 60) -> np.ndarray:
    """Seconds a step over one lap, far from the beginning: a lap is whole turns of all cycles."""
    points = np.atleast_2d(points)
    steps = before + lap
    ends = Compiled(graph, steps).ends(np.tile(points, steps))
    ends = ends.reshape(len(points), steps, len(graph)).max(axis=2)
    return (ends[:, -1] - ends[:, before - 1]) / lap


def all_cycles(graph: TaskGraph) -> list[tuple[list[int], int]]:
    """Every simple cycle of edges and lanes as they stand: its tasks, and steps it spans."""
    at = {t.id: i for i, t in enumerate(graph)}
    spans: dict[tuple[int, int], int] = {}

    def add(u: int, v: int, distance: int) -> None:
        spans[u, v] = min(distance, spans.get((u, v), distance))

    for e in graph.edges:
        add(at[e.src], at[e.dst], e.reason.distance)
    for queue in graph.lanes.values():
        for u, v in zip(queue, queue[1:], strict=False):
            add(at[u.id], at[v.id], 0)
        add(at[queue[-1].id], at[queue[0].id], 1)
    cycles = nx.simple_cycles(nx.DiGraph(spans.keys()))
    return [(c, sum(spans[u, v] for u, v in zip(c, c[1:] + c[:1], strict=True))) for c in cycles]


def pipeline() -> TaskGraph:
    """A copy into one slot and its use: the next copy waits for the use."""
    tasks = (task("copy", "BULK"), task("use", "GPU"), task("other", "CPU"))
    return TaskGraph(tasks, (edge("copy", "use"), edge("use", "copy", "BUFFER", 1, "slot")))


def test_one_slot_makes_a_cycle_of_copy_and_use():
    s = steady(pipeline(), CostModel.fixed({"copy": 3, "use": 2, "other": 4}))
    assert (s.period_s, s.critical, s.critical_steps) == (5.0, (tid("copy"), tid("use")), 1)
    assert s.unique
    assert s.by_task["shortens"].tolist() == [1.0, 1.0, 0.0]
    assert s.by_lane["share"].to_dict() == {"BULK": 0.6, "GPU": 0.4, "CPU": 0.0}
    assert s.by_op.loc["copy"].tolist() == [1, 3.0, 1.0, 0.6]
    assert "period 5.00 s" in repr(s) and "BULK 60%, GPU 40%" in repr(s)


def test_a_cycle_over_two_steps_counts_half():
    # Two slots for three uses a step: the slot of value 0 comes up again at value 2, then at
    # value 1 of the next step, and at value 0 of the one after. All uses take 2, the queue 1:
    # each of three waits for the copy's use two before: 3 x (1 + 2) over two steps.
    tasks = [
        task(f"{kind}{i}", lane) for i in range(3) for kind, lane in (("c", "BULK"), ("u", "GPU"))
    ]
    edges = [edge(f"c{i}", f"u{i}") for i in range(3)]
    edges += [
        edge("u0", "c2", "BUFFER", 0, "slot"),
        edge("u1", "c0", "BUFFER", 1, "slot"),
        edge("u2", "c1", "BUFFER", 1, "slot"),
    ]
    # Each use on a lane of its own, or the queue of uses would be as long.
    lanes = dict(u0="GPU", u1="CPU", u2="KV")
    tasks = [task(t.id.op, lanes.get(t.id.op, "BULK")) for t in tasks]
    graph = TaskGraph(tuple(tasks), tuple(edges))
    seconds = dict(c0=1, c1=1, c2=1, u0=2, u1=2, u2=2)
    s = steady(graph, CostModel.fixed(seconds))
    assert (s.period_s, s.critical_steps, len(s.critical)) == (4.5, 2, 6)
    assert s.by_task["shortens"].tolist() == [0.5] * 6
    point = [seconds[t.id.op] for t in graph]
    assert long_run_s(graph, point)[0] == pytest.approx(4.5)


def test_where_two_cycles_are_as_long_neither_alone_shortens_anything():
    cost = CostModel.fixed({"copy": 3, "use": 2, "other": 5})
    s = steady(pipeline(), cost)
    assert s.period_s == 5.0 and not s.unique
    assert s.by_task["shortens"].tolist() == [0, 0, 0]
    assert "other cycles are as long" in repr(s)
    # A task that both go through does: two ways from a to d, both of 2.
    tasks = (task("a", "GPU"), task("b", "BULK"), task("c", "KV"), task("d", "CPU"))
    edges = (
        edge("a", "b"),
        edge("a", "c"),
        edge("b", "d"),
        edge("c", "d"),
        edge("d", "a", distance=1),
    )
    s = steady(TaskGraph(tasks, edges), CostModel.fixed(dict(a=1, b=2, c=2, d=3)))
    assert s.by_task["shortens"].tolist() == [1, 0, 0, 1]
    assert s.by_lane["share"].to_dict() == {"CPU": 0.5, "GPU": 1 / 6, "BULK": 0.0, "KV": 0.0}


@pytest.fixture(scope="module")
def random_cases():
    rng = np.random.default_rng(51)
    graphs = [random_graph(rng) for _ in range(120)]
    return [(graph, random_durations(rng, graph)) for graph in graphs]


def test_the_period_is_that_of_a_long_run_and_of_the_longest_cycle(random_cases):
    for graph, durations in random_cases:
        s = steady(graph, CostModel.fixed(durations))
        longest = max(
            sum(durations[graph.tasks[v].id] for v in tasks) / steps
            for tasks, steps in all_cycles(graph)
        )
        assert s.period_s == pytest.approx(longest, rel=1e-10)
        point = [durations[t.id] for t in graph]
        assert s.period_s == pytest.approx(long_run_s(graph, point)[0], rel=1e-9, abs=1e-12)


def test_sensitivities_are_what_every_longest_cycle_loses(random_cases):
    shared = 0
    for graph, durations in random_cases:
        s = steady(graph, CostModel.fixed(durations))
        seconds = [durations[t.id] for t in graph]
        longest = [
            (set(tasks), steps)
            for tasks, steps in all_cycles(graph)
            if sum(seconds[v] for v in tasks) / steps > s.period_s * (1 - 1e-9)
        ]
        if not s.period_s:
            continue
        shared += not s.unique
        assert len(longest) == 1 or not s.unique or 0.0 in seconds
        longest = [({v for v in tasks if seconds[v]}, steps) for tasks, steps in longest]
        for v, shortens in enumerate(s.by_task["shortens"]):
            least = min((v in tasks) / steps for tasks, steps in longest)
            assert shortens == pytest.approx(least, rel=1e-9)
        for lane, row in s.by_lane.iterrows():
            members = {v for v, t in enumerate(graph) if t.lane.value == lane}
            least = min(len(members & tasks) / steps for tasks, steps in longest)
            assert row["shortens"] == pytest.approx(least, rel=1e-9)
            least_s = min(sum(seconds[v] for v in members & tasks) / k for tasks, k in longest)
            assert row["share"] == pytest.approx(least_s / s.period_s, rel=1e-8, abs=1e-8)
    assert shared > 5


def test_sensitivities_agree_with_differences_of_long_runs(random_cases):
    moved = 0
    for graph, durations in random_cases:
        s = steady(graph, CostModel.fixed(durations))
        point = np.array([durations[t.id] for t in graph])
        if not point.any():
            continue
        h = 1e-5 * point[point > 0].min()
        if s.period_s > 1e8 * h:  # the difference would drown in rounding
            continue
        fewer = np.maximum(0.0, point - h * np.eye(len(point)))
        period_s, *shorter_s = long_run_s(graph, np.vstack([point, fewer]))
        given = s.by_task["shortens"]
        assert (period_s - np.array(shorter_s)) / h == pytest.approx(given, abs=1e-3)
        moved += int((given > 0).sum())
    assert moved > 30


def test_one_slot_more_is_what_the_graph_with_one_more_takes(random_cases):
    gained = 0
    for graph, durations in random_cases:
        if not graph.rings:
            continue
        s = steady(graph, CostModel.fixed(durations))
        point = [durations[t.id] for t in graph]
        for name, row in s.by_slot.iterrows():
            ring = graph.rings[name]
            if ring.slots == ring.uses:
                assert np.isnan(row["gain_s"])
                continue
            rings = {**graph.rings, name: Ring(ring.name, ring.slots + 1, ring.uses)}
            anew = assemble(graph.tasks, rings)
            assert set(with_slots(graph, name, ring.slots + 1).edges) == set(anew.edges)
            assert row["period_s"] == pytest.approx(long_run_s(anew, point)[0], rel=1e-9, abs=1e-12)
            assert row["gain_s"] == s.period_s - row["period_s"] >= 0
            gained += row["gain_s"] > 1e-9 * s.period_s
    assert gained > 2


@pytest.mark.parametrize("omega, slots", [(0.6, 8), (0.0, 1), (0.3, 2)])
def test_a_decode_step_keeps_the_period_and_loses_what_is_said(omega, slots):
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=4)
    strategy = mg.Strategy(
        B=2000, b_a=128, b_e=8192, s_expert=slots * model.expert_bytes, omega=omega
    )
    graph = mg.build(model, strategy, kv_len=640)
    cost = CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    s = mg.steady(graph, cost)
    run = mg.simulate(graph, cost, steps=40, shared=False)
    assert np.diff(run.step_end_s[20:-1]) == pytest.approx(s.period_s, rel=1e-9)
    assert s.by_task["shortens"].sum() == len(s.critical) / s.critical_steps
    assert s.by_op["shortens"].sum() == pytest.approx(len(s.critical) / s.critical_steps)
    assert s.by_lane["share"].sum() == pytest.approx(1.0)
    # Each op in turn a little faster.
    seconds, shares = Compiled(graph).seconds(cost), s.by_op["share"]
    ops = np.array([t.id.op for t in graph])
    faster = [np.where(ops == op, seconds * (1 - 1e-6), seconds) for op in shares.index]
    less_s = s.period_s - long_run_s(graph, faster, lap=4, before=20)
    assert less_s == pytest.approx(1e-6 * s.period_s * shares, abs=1e-10 * s.period_s)
    slot = s.by_slot["gain_s"].idxmax()
    assert (s.by_slot.loc[slot, "gain_s"] > 0) == (slots < 8)


def test_a_buffer_edge_that_is_an_input_as_well_gains_nothing():
    graph = pipeline()
    both = TaskGraph(graph.tasks, (*graph.edges, edge("use", "copy", distance=1)))
    assert {e.reason.kind for e in both.edges} == {EdgeKind.DATA, EdgeKind.BUFFER}
    assert steady(both, CostModel.fixed(dict(copy=3, use=2, other=1))).period_s == 5.0


def test_what_has_no_steady_state_is_refused():
    cost = CostModel.fixed({"early": 1, "late": 1})
    stuck = TaskGraph((task("early", "GPU"), task("late", "GPU")), (edge("late", "early"),))
    with pytest.raises(DeadlockError, match="early"):
        steady(stuck, cost)
    with pytest.raises(GraphError, match="2 steps"):
        steady(pipeline().unroll(2), cost)
    with pytest.raises(GraphError, match="0 tasks"):
        steady(TaskGraph((), ()), cost)
    with pytest.raises(GraphError, match="no ring is called 'x'"):
        with_slots(pipeline(), "x", 2)
