"""Shapes, binding, hashes and JSON; and a thousand builds at random that must all be sound."""

from __future__ import annotations

import json

import networkx as nx
import numpy as np
import pytest
from handmade import join, random_durations
from small_models import deepseek, mixtral, two_layers

from moegen.errors import GraphError, InvalidInput
from moegen.graph.build import build
from moegen.graph.io import from_dict
from moegen.graph.shape import Shape
from moegen.graph.strategy import Strategy
from moegen.graph.task import EdgeKind, TaskGraph, TaskId
from moegen.sim.bounds import critical_path_s
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate

S = Strategy(B=4, b_a=1, b_e=8, omega=0.5)


def test_structure_does_not_depend_on_lengths():
    short, long = (build(mixtral(), S, kv_len=n) for n in (9, 400))
    assert short.structure_hash == long.structure_hash
    assert short.shape_hash != long.shape_hash
    assert short.bind(long.shape).shape_hash == long.shape_hash
    assert build(mixtral(), S, kv_len=9).shape_hash == short.shape_hash
    others = [S.with_(omega=0.0), S.with_(b_a=2), S.with_(kv_slots=1), S.with_(fetch="routed")]
    hashes = {build(mixtral(), s, kv_len=9).structure_hash for s in others}
    assert len(hashes | {short.structure_hash}) == 5
    assert len(short.structure_hash) == 64 and short.structure_hash[:12] in repr(short)


def test_routing_is_part_of_the_shape():
    g = build(mixtral(), S, kv_len=9)
    even = g.shape
    skewed = Shape(even.past, even.new, {0: (8, 0, 0, 0), 1: (0, 1, 3, 4)})
    h = g.bind(skewed)
    assert h.structure_hash == g.structure_hash and h.shape_hash != g.shape_hash
    tokens = {t.id[3::2]: t.work.tokens for t in h if t.id.op == "expert"}
    assert tokens == {(0, 0): 8, (0, 1): 0, (0, 2): 0, (0, 3): 0} | {
        (1, 0): 0, (1, 1): 1, (1, 2): 3, (1, 3): 4,
    }  # fmt: skip
    idle = h[TaskId("expert", "decode", 0, 0, -1, 1)]
    assert idle.work.empty and idle.work.flops == 0
    # b_e tiles: 8 tokens in threes are three matrix products.
    tiled = build(mixtral(), S.with_(b_e=3), kv_len=9).bind(skewed)
    assert tiled[TaskId("expert", "decode", 0, 0, -1, 0)].work.launches == 3


def test_rows_that_ended_take_no_part():
    g = build(mixtral(), S, kv_len=9).bind(Shape((9,) * 4, (1, 0, 1, 0)))
    rows = {(t.id.op, t.id.microbatch): t.work.rows for t in g if t.id.layer in (0, -1)}
    assert rows["attn_cpu", -1] == 1 and rows["attn_gpu", 0] == 1 and rows["attn_gpu", 1] == 0
    assert rows["lm_head", -1] == 2
    assert g[TaskId("attn_gpu", "decode", 0, 0, 1)].work.empty


def test_what_cannot_be_bound_is_refused():
    g = build(mixtral(), S, kv_len=9)
    with pytest.raises(GraphError, match="laid out for 4 rows and the shape has 3"):
        g.bind(Shape.uniform(3, 9, 1))
    with pytest.raises(GraphError, match="before unrolling"):
        g.unroll(2).bind(g.shape)
    with pytest.raises(GraphError, match="made by hand"):
        join()[0].bind(g.shape)
    with pytest.raises(InvalidInput, match="got 2 and 1"):
        Shape((1, 2), (1,))
    with pytest.raises(InvalidInput, match=r"past\[1\] must be .* at least 0, got -2"):
        Shape((1, -2), (1, 1))


def test_shape_round_trip():
    shape = Shape((3, 3, 3, 7), (1, 0, 0, 1), {1: (2, 0), 0: (1, 1)})
    data = json.loads(json.dumps(shape.to_dict()))
    assert data["past"] == [[3, 3], [7, 1]]
    assert Shape.from_dict(data) == shape
    assert Shape.from_dict(Shape.uniform(2, 5, 1).to_dict()) == Shape((5, 5), (1, 1))
    assert (shape.rows, shape.tokens) == (4, 2)


def test_json_round_trip(tmp_path):
    graphs = [
        two_layers(),
        build(deepseek(), S.with_(fetch="routed"), lengths=[3, 1, 7]),
        build(deepseek(), S.with_(s_params=10**6), "prefill", lengths=[3, 1, 7]),
        two_layers().unroll(3),
        join()[0],
    ]
    for n, g in enumerate(graphs):
        file = tmp_path / f"{n}.json"
        g.to_json(file)
        back = TaskGraph.from_json(file)
        assert (back.structure_hash, back.shape_hash) == (g.structure_hash, g.shape_hash)
        assert repr(back) == repr(g)
        assert (back.tasks, back.edges, back.rings) == (g.tasks, g.edges, g.rings)
        assert (back.model, back.strategy, back.layout) == (g.model, g.strategy, g.layout)
        assert back.shape == g.shape and back.n_steps == g.n_steps and back.phase == g.phase
        assert back.to_dict() == g.to_dict()


def test_json_that_is_no_graph_is_refused(tmp_path):
    def refused(text, says):
        (tmp_path / "g.json").write_text(text)
        with pytest.raises(InvalidInput, match=says):
            TaskGraph.from_json(tmp_path / "g.json")

    refused("{", "g.json is not JSON: line 1")
    refused("[]", "not a task graph: .* found 'list'")
    refused('{"format": "other"}', "found 'other'")
    data = two_layers().to_dict()
    del data["structure"]["edges"]
    refused(json.dumps(data), "damaged: KeyError: 'edges'")
    with pytest.raises(InvalidInput, match="cannot read the task graph .*nowhere.json"):
        TaskGraph.from_json(tmp_path / "nowhere.json")


def test_cycles_and_strange_edges_are_refused():
    g = join()[0]
    back = g.edges[0]._replace(src=g.edges[0].dst, dst=g.edges[0].src)
    with pytest.raises(GraphError, match="wait for each other: .*decode:a"):
        TaskGraph(g.tasks, (*g.edges, back))
    far = g.edges[0]._replace(reason=g.edges[0].reason._replace(distance=2))
    with pytest.raises(GraphError, match="spans 2 steps"):
        TaskGraph(g.tasks, (far,))
    stray = g.edges[0]._replace(src=TaskId("nobody", "decode"))
    with pytest.raises(GraphError, match="a task the graph does not have"):
        TaskGraph(g.tasks, (stray,))


N_BUILDS, CHUNKS = 1000, 10


def a_build(rng):
    """A small model, a strategy and lengths, all at random."""

    def one(*values):
        return values[rng.integers(len(values))]

    layers, experts = int(rng.integers(1, 4)), one(2, 4, 5)
    if rng.random() < 0.5:
        model = mixtral(num_hidden_layers=layers, num_local_experts=experts)
    else:
        dense = int(rng.integers(0, layers + 1))
        model = deepseek(
            num_hidden_layers=layers,
            first_k_dense_replace=dense,
            n_routed_experts=experts,
            num_experts_per_tok=2,
            n_shared_experts=one(1, None),
        )
    phase = one("decode", "prefill")
    rows = int(rng.integers(1, 6))
    s = Strategy(
        B=rows,
        b_a=int(rng.integers(1, 4)),
        b_e=one(1, 7, 1000),
        s_expert=int(rng.integers(0, 12)) * model.expert_bytes,
        s_params=int(one(0.0, rng.random(), 1.0) * model.weight_bytes),
        omega=float(one(0.0, rng.random(), 1.0)),
        kv_slots=int(rng.integers(1, 4)),
        dense_slots=int(rng.integers(1, 4)),
        expert_group=int(rng.integers(1, 4)),
        fetch=one("all", "routed"),
    )
    lengths = rng.integers(1, 20, size=rows).tolist()
    return build(model, s, phase, lengths=lengths, kv_slot_tokens=one(None, 16))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_builds_at_random_are_sound(chunk):
    rng = np.random.default_rng(chunk)
    seen = set()
    for k in range(N_BUILDS // CHUNKS):
        g = a_build(rng)
        steps = 1 + k % 3
        cost = CostModel.fixed(random_durations(rng, g))
        timeline = simulate(g, cost, steps=steps, shared=False)
        assert float(timeline.end_s.max()) == critical_path_s(g, cost, steps=steps)
        assert all(t.work is not None and t.lane is g[t.id].lane for t in g)
        if k % 10 == 0:
            assert_slots_are_safe(g)
            back = from_dict(json.loads(json.dumps(g.to_dict())))
            assert (back.structure_hash, back.shape_hash) == (g.structure_hash, g.shape_hash)
        seen.add(g.structure_hash)
    assert len(seen) > 80  # hardly ever the same


def assert_slots_are_safe(g):
    """Whoever writes a slot comes after all that used it before, by some path of edges."""
    u = g.unroll(2)
    users, writers = {}, {}
    for t in u:
        for v in t.writes:
            writers.setdefault(v[:2], []).append(t.id)
        for v in (*t.reads, *t.writes):
            users.setdefault(v[:2], []).append(t.id)
    after = {i: nx.descendants(u.step_dag, i) for i in u.step_dag}
    for name, ring in u.rings.items():
        for n in range(g.rings[name].slots, ring.uses):
            for before in users.get((name, n - g.rings[name].slots), ()):
                for w in writers.get((name, n), ()):
                    assert before == w or w in after[before], f"{name}: {before} and {w}"


def test_the_check_of_slots_can_fail():
    g = two_layers()
    assert_slots_are_safe(g)
    for buffer in ("expert_weights", "rows"):
        with pytest.raises(AssertionError, match=buffer):
            assert_slots_are_safe(g.without(EdgeKind.BUFFER, buffer))
