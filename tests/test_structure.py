"""A graph's order in whole numbers against networkx on the unrolled graph."""

from __future__ import annotations

import networkx as nx
import numpy as np
from handmade import edge, random_graph, task

from moegen.graph.build import build
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy
from moegen.graph.structure import Structure
from moegen.graph.task import TaskGraph

STEPS = 4


def unrolled(graph: TaskGraph) -> nx.DiGraph:
    """Every edge and the order of lanes over some steps, nodes (step, position)."""
    at = {t.id: i for i, t in enumerate(graph)}
    dag = nx.DiGraph()
    dag.add_nodes_from((k, i) for k in range(STEPS) for i in range(len(graph)))
    for e in graph.edges:
        for k in range(e.reason.distance, STEPS):
            dag.add_edge((k - e.reason.distance, at[e.src]), (k, at[e.dst]))
    for queue in graph.lanes.values():
        nx.add_path(dag, [(k, at[t.id]) for k in range(STEPS) for t in queue])
    return dag


def reduced(structure: Structure) -> nx.DiGraph:
    """The same from the waits that are left, and lanes."""
    dag = nx.DiGraph()
    dag.add_nodes_from((k, i) for k in range(STEPS) for i in range(structure.n))
    for k in range(STEPS):
        for v, waits in enumerate(structure.later if k else structure.first):
            dag.add_edges_from(((k + u // structure.n, u % structure.n), (k, v)) for u in waits)
    for queue in structure.lanes:
        nx.add_path(dag, [(k, v) for k in range(STEPS) for v in queue])
    return dag


def test_what_is_left_implies_every_edge_and_nothing_more():
    rng = np.random.default_rng(7)
    dropped = 0
    for _ in range(60):
        graph = random_graph(rng)
        full, left = unrolled(graph), reduced(graph.structure)
        assert nx.transitive_closure_dag(left).edges == nx.transitive_closure_dag(full).edges
        needed = nx.transitive_reduction(full).edges
        lane_of = graph.structure.lane_of
        for u, v in left.edges:
            assert lane_of[u[1]] == lane_of[v[1]] or (u, v) in needed
        dropped += len(full.edges) - len(left.edges)
    assert dropped > 200


def test_tasks_come_in_an_order_in_which_they_can_run():
    rng = np.random.default_rng(8)
    for _ in range(60):
        graph = random_graph(rng)
        place = {v: k for k, v in enumerate(graph.structure.order)}
        assert sorted(place) == list(range(len(graph)))
        assert all(place[u] < place[v] for u, v, d in graph.structure.edges if d == 0)


def test_a_lane_whose_order_contradicts_an_edge_stops_there():
    graph = TaskGraph(
        (task("early", "GPU"), task("late", "GPU"), task("copy", "BULK"), task("idle", "CPU")),
        (edge("late", "early"), edge("early", "copy")),
    )
    assert graph.structure.order == (3,)
    assert graph.structure.first == ((1,), (), (0,), ())


def test_shapes_share_a_structure_and_alike_layers_their_kinds():
    model = ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=4)
    s = Strategy(B=64, b_a=16, b_e=256, s_expert=4 * model.expert_bytes, omega=0.5)
    graph = build(model, s, kv_len=640)
    assert graph.shape is not None
    other = graph.bind(graph.shape)
    assert other.structure is graph.structure
    examples, kinds = graph.kinds
    assert len(examples) < len(graph) / 3
    for t, kind in zip(graph, kinds, strict=True):
        example = examples[kind]
        assert (t.id[:2], t.lane, t.work) == (example.id[:2], example.lane, example.work)
