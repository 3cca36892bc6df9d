"""Longest paths and bounds, by hand and on a thousand random graphs."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from handmade import edge, join, random_demands, random_durations, random_graph, task, tid

from moegen.errors import GraphError
from moegen.graph.build import build
from moegen.graph.hardware import HardwareSpec
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy
from moegen.graph.task import Lane, TaskGraph
from moegen.sim.bounds import bound, bound_s, critical_path_s
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate

N_GRAPHS = 1000


def test_longest_path_by_hand():
    graph, durations = join()
    # b, c, e: 3 + 4 + 1 against a, d, e: 2 + 4.5 + 1.
    assert critical_path_s(graph, CostModel.fixed(durations)) == 8.0
    # Two steps. a1 stands behind e0 on the GPU (8-10), b1 runs at 3-6, c1 10-14, d1 10-14.5.
    assert critical_path_s(graph, CostModel.fixed(durations), steps=2) == 15.5


def test_the_bound_is_made_of_lanes_resources_and_chain():
    # One layer: the hidden state goes round pre -> attn -> post -> pre of the next step; the
    # copy is wanted by post but waits for nobody.
    graph = TaskGraph(
        (
            task("pre", "GPU"),
            task("attn", "CPU"),
            task("copy", "BULK"),
            task("fetch", "KV"),
            task("post", "GPU"),
        ),
        (
            edge("pre", "attn"),
            edge("attn", "post"),
            edge("copy", "post"),
            edge("fetch", "post"),
            edge("post", "pre", distance=1),
            edge("post", "copy", "BUFFER", distance=1),
        ),
    )
    cost = CostModel.fixed(
        {"pre": 1, "attn": 4, "copy": 3, "fetch": 2.5, "post": 2},
        demands={"copy": {"h2d": 30}, "fetch": {"h2d": 20}},
        capacities={"h2d": 10},
    )
    parts = bound(graph, cost)
    assert parts.lanes == {Lane.GPU: 3.0, Lane.CPU: 4.0, Lane.BULK: 3.0, Lane.KV: 2.5}
    assert parts.resources == {"h2d": 5.0}  # both lanes of the link together, 50 bytes at 10
    assert (parts.chain_s, parts.chain) == (7.0, (tid("pre"), tid("attn"), tid("post")))
    assert (parts.seconds, parts.binds) == (7.0, "chain")
    assert bound_s(graph, cost) == 7.0
    assert "7.00 s by chain" in repr(parts)
    # A BUFFER edge is no input: without the DATA edge round, the copy and post, which that edge
    # joins to a circle of 5 s, are no chain, and lanes and link bind.
    open_end = TaskGraph(graph.tasks, [e for e in graph.edges if e.dst != tid("pre")])
    assert bound(open_end, cost).chain_s == 0.0
    assert bound(open_end, cost).binds == "resource h2d"
    with pytest.raises(GraphError, match="2"):
        bound_s(graph.unroll(2), cost)


def test_the_chain_takes_the_longest_way_round():
    graph = TaskGraph(
        (
            task("pre", "GPU"),
            task("fetch", "KV"),
            task("attn", "CPU"),
            task("up", "ACT"),
            task("post", "GPU"),
        ),
        (
            edge("pre", "fetch"),
            edge("pre", "attn"),
            edge("attn", "up"),
            edge("fetch", "post"),
            edge("up", "post"),
            edge("pre", "post", "LANE"),
            edge("post", "pre", distance=1),
            edge("up", "attn", distance=1),
        ),
    )
    # pre 1, then fetch 2, or attn 3 and up 1, then post 1: 4 or 6 s. attn and up alone: 4 s.
    cost = CostModel.fixed({"pre": 1, "fetch": 2, "attn": 3, "up": 1, "post": 1})
    assert bound(graph, cost).chain_s == 6.0
    # The other way about: 8 or 6.
    cost = CostModel.fixed({"pre": 1, "fetch": 6, "attn": 3, "up": 1, "post": 1})
    assert bound(graph, cost).chain == (tid("pre"), tid("fetch"), tid("post"))


def test_a_task_that_feeds_itself_is_a_chain_of_one():
    graph = TaskGraph((task("attn", "CPU"),), (edge("attn", "attn", distance=1),))
    assert bound(graph, CostModel.fixed({"attn": 3})).chain == (tid("attn"),)


@pytest.fixture(scope="module")
def random_cases():
    rng = np.random.default_rng(20250917)
    cases = []
    for _ in range(N_GRAPHS):
        graph = random_graph(rng)
        cases.append((graph, random_durations(rng, graph), random_demands(rng, graph)))
    kinds = {e.reason[:2] for graph, *_ in cases for e in graph.edges}
    assert len(kinds) == 6  # each kind at each distance
    assert sum(bool(graph.rings) for graph, *_ in cases) > N_GRAPHS / 4
    return cases


def test_unshared_simulation_is_the_longest_path_to_the_last_digit(random_cases):
    for k, (graph, durations, _) in enumerate(random_cases):
        cost = CostModel.fixed(durations)
        steps = 1 + k % 3
        timeline = simulate(graph, cost, steps=steps, shared=False)
        longest = critical_path_s(graph, cost, steps=steps)
        assert float(timeline.end_s.max()) == longest
        # Eq. 4 as it stands, over the unrolled graph's edges and lane order alone.
        assert _eq4(graph.unroll(steps), durations) == longest
        # Demands on nothing disturb nobody, to the last digit as well.
        assert float(simulate(graph, cost, steps=steps).end_s.max()) == longest
        bounds = bound(graph, cost)
        assert timeline.end_s.max() >= steps * bounds.seconds * (1 - 1e-12)


def _eq4(unrolled: TaskGraph, durations: dict) -> float:
    before = nx.DiGraph(unrolled.step_dag)
    for queue in unrolled.lanes.values():
        nx.add_path(before, [t.id for t in queue])
    dp: dict = {}
    for v in nx.topological_sort(before):
        dp[v] = max((dp[u] for u in before.predecessors(v)), default=0.0)
        dp[v] += durations[v._replace(step=0)]
    return max(dp.values())


def test_sharing_never_helps_and_respects_capacities(random_cases):
    capacities = {"h2d": 1.0, "d2h": 1.0, "host_memory": 1.0}
    slowed = 0
    for k, (graph, durations, demands) in enumerate(random_cases):
        cost = CostModel.fixed(durations, demands=demands, capacities=capacities, duplex=0.8)
        steps = 1 + k % 3
        timeline = simulate(graph, cost, steps=steps)
        taken = timeline.end_s - timeline.start_s
        wanted = np.array([cost.seconds(t) for t in timeline.tasks])
        assert (taken >= wanted - 1e-12 * timeline.end_s).all()
        end = float(timeline.end_s.max())
        assert end >= steps * bound_s(graph, cost) * (1 - 1e-9)
        assert end >= critical_path_s(graph, cost, steps=steps) * (1 - 1e-12)
        slowed += bool((taken > wanted * (1 + 1e-6)).any())
        # The run is the longest path of its own durations.
        measured = CostModel.fixed(dict(zip(timeline.ids, taken.tolist(), strict=True)))
        assert critical_path_s(graph, measured, steps=steps) == pytest.approx(end, rel=1e-9)
        _check_capacities(timeline, cost, capacities)
    assert slowed > N_GRAPHS / 2


def _check_capacities(timeline, cost, capacities):
    """What a resource has delivered by any moment is at most its capacity times that moment."""
    moments = np.unique(timeline.end_s)
    whole = [cost.loads(cost.estimate(t)) for t in timeline.tasks]
    seconds = [cost.seconds(t) for t in timeline.tasks]
    for name, capacity in capacities.items():
        # A task that has ended by t has drawn all of its units.
        for t in moments:
            units = sum(
                load.get(name, 0.0) * s
                for load, s, end in zip(whole, seconds, timeline.end_s, strict=True)
                if end <= t
            )
            assert units <= capacity * t * (1 + 1e-9) + 1e-12


BUILT = [
    ("mixtral-8x7b", "decode", {"omega": 0.6}),
    ("mixtral-8x7b", "decode", {"omega": 0.0, "fetch": "routed"}),
    ("deepseek-v2-lite", "decode", {"omega": 0.5, "expert_group": 8}),
    ("mixtral-8x7b", "prefill", {"expert_group": 2}),
    ("gpt-oss-20b", "prefill", {"expert_group": 8}),
]


@pytest.mark.parametrize("name, phase, knobs", BUILT)
def test_built_graphs_keep_to_the_longest_path_and_the_bound(name, phase, knobs):
    model, hw = ModelSpec.from_pretrained(name), HardwareSpec.from_name("c2")
    strategy = Strategy(B=64, b_a=16, b_e=256, s_expert=4 * model.expert_bytes, **knobs)
    length = {"kv_len": 640} if phase == "decode" else {"prompt_len": 512}
    graph, cost = build(model, strategy, phase, **length), CostModel.roofline(hw)
    for steps in (1, 2):
        alone = simulate(graph, cost, steps=steps, shared=False)
        assert alone.makespan_s == critical_path_s(graph, cost, steps=steps)
        together = simulate(graph, cost, steps=steps)
        assert together.makespan_s >= alone.makespan_s * (1 - 1e-12)
        assert together.makespan_s >= steps * bound_s(graph, cost) * (1 - 1e-9)
    unrolled = simulate(graph.unroll(2), cost)
    assert (unrolled.ids, unrolled.end_s.tolist()) == (together.ids, together.end_s.tolist())
    assert unrolled.ready_s.tolist() == together.ready_s.tolist()
    assert unrolled.critical_path().equals(together.critical_path())
    if phase == "decode":  # round every layer of the step, from the table of rows to the tokens
        chain = bound(graph, cost).chain
        assert (chain[0].op, chain[-1].op) == ("copy_rows", "copy_tokens")
        assert {i.layer for i in chain} >= set(range(model.n_layers))


@pytest.mark.parametrize("slots", [1, 8, 32])
@pytest.mark.parametrize("omega", [0.0, 0.3, 1.0])
def test_a_period_is_never_below_the_bound_however_few_steps(slots, omega):
    # With slots for a whole step of experts, the last step has the link for itself.
    model = ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=4)
    s = Strategy(B=2000, b_a=256, b_e=8192, s_expert=slots * model.expert_bytes, omega=omega)
    g = build(model, s, "decode", kv_len=640)
    cost = CostModel.roofline(HardwareSpec.from_name("c2"))
    periods = [simulate(g, cost, steps=n).period_s for n in (3, 4, 8)]
    assert min(periods) >= bound_s(g, cost) * (1 - 1e-9)
    assert max(periods) <= min(periods) * 1.01
