"""Small graphs for tests of the simulator: made by hand, or at random."""

from __future__ import annotations

import numpy as np

from moegen.errors import GraphError
from moegen.graph.passes import assemble
from moegen.graph.task import (
    Edge,
    EdgeKind,
    Lane,
    Reason,
    Ring,
    Task,
    TaskGraph,
    TaskId,
    Value,
    Work,
)
from moegen.timeline import Timeline


def tid(op: str, step: int = 0) -> TaskId:
    return TaskId(op, "decode", step)


def task(op: str, lane: str, work: Work | None = None) -> Task:
    return Task(tid(op), Lane(lane), work=work)


def edge(src: str, dst: str, kind: str = "DATA", distance: int = 0, buffer: str = "") -> Edge:
    return Edge(tid(src), tid(dst), Reason(EdgeKind(kind), distance, buffer))


def times(timeline) -> dict[str, tuple[float, float]]:
    """Start and end by op, with the step behind it where there are several."""
    several = len(timeline.steps) > 1
    return {
        f"{i.op}{i.step}" if several else i.op: (float(s), float(e))
        for i, s, e in zip(timeline.ids, timeline.start_s, timeline.end_s, strict=True)
    }


def join() -> tuple[TaskGraph, dict[str, float]]:
    """Five tasks on three lanes that end in one: times are worked out in the tests."""
    graph = TaskGraph(
        (
            task("a", "GPU"),
            task("b", "BULK"),
            task("c", "GPU"),
            task("d", "CPU"),
            task("e", "GPU"),
        ),
        (
            edge("a", "c", buffer="x"),
            edge("b", "c", buffer="weights"),
            edge("a", "d", buffer="queries"),
            edge("c", "e", buffer="y"),
            edge("d", "e", buffer="attention"),
        ),
    )
    return graph, {"a": 2.0, "b": 3.0, "c": 4.0, "d": 4.5, "e": 1.0}


def random_graph(rng: np.random.Generator) -> TaskGraph:
    """Up to 12 tasks: half with edges of any kind at random, half from rings of slots."""
    while True:
        try:
            return _from_rings(rng) if rng.random() < 0.5 else _from_edges(rng)
        except GraphError:
            continue  # slots and order happened to contradict each other


def _from_edges(rng: np.random.Generator) -> TaskGraph:
    n = int(rng.integers(2, 13))
    lanes, kinds = list(Lane), list(EdgeKind)
    tasks = [Task(TaskId("t", "decode", 0, k), lanes[rng.integers(5)]) for k in range(n)]
    edges = []
    for _ in range(int(rng.integers(0, 2 * n))):
        u, v = sorted(rng.integers(n, size=2))
        if u != v:
            edges.append(Edge(tasks[u].id, tasks[v].id, Reason(kinds[rng.integers(3)])))
    for _ in range(int(rng.integers(0, n))):
        u, v = rng.integers(n, size=2)
        edges.append(Edge(tasks[u].id, tasks[v].id, Reason(kinds[rng.integers(3)], 1)))
    return TaskGraph(tuple(tasks), tuple(dict.fromkeys(edges)))


def _from_rings(rng: np.random.Generator) -> TaskGraph:
    n = int(rng.integers(3, 13))
    lanes = list(Lane)
    reads: list[list[Value]] = [[] for _ in range(n)]
    writes: list[list[Value]] = [[] for _ in range(n)]
    rings = {}
    for b in range(int(rng.integers(1, 4))):
        writers = sorted(rng.choice(n - 1, size=int(rng.integers(1, n)), replace=False))
        for index, w in enumerate(writers):
            writes[w].append(Value(f"b{b}", index))
            for _ in range(int(rng.integers(1, 3))):
                reads[rng.integers(w + 1, n)].append(Value(f"b{b}", index))
        if rng.random() < 0.3:
            reads[rng.integers(n)].append(Value(f"b{b}", len(writers) - 1, 1))
        slots = int(rng.integers(1, len(writers) + 1))
        rings[f"b{b}"] = Ring(f"b{b}", slots, len(writers))
    tasks = [
        Task(
            TaskId("t", "decode", 0, k),
            lanes[rng.integers(5)],
            tuple(dict.fromkeys(reads[k])),
            tuple(writes[k]),
        )
        for k in range(n)
    ]
    return assemble(tasks, rings)


def random_durations(rng: np.random.Generator, graph: TaskGraph) -> dict[TaskId, float]:
    """Of every kind: none at all, whole numbers (for ties), and odd ones of every size."""
    draws = (
        lambda: 0.0,
        lambda: float(rng.integers(1, 4)),
        lambda: float(rng.random()),
        lambda: float(10 ** rng.uniform(-6, 2)),
    )
    return {t.id: draws[rng.integers(4)]() for t in graph}


def random_demands(rng: np.random.Generator, graph: TaskGraph) -> dict[TaskId, dict[str, float]]:
    """Draws on three resources of capacity 1, from light to more than there is."""
    names = ("h2d", "d2h", "host_memory")
    return {t.id: {r: float(rng.random() * 3) for r in names if rng.random() < 0.5} for t in graph}


def as_measured(run: Timeline, **meta: object) -> Timeline:
    """A simulated run as if it had been measured, with what ``meta`` says of it."""
    return Timeline(run.graph, run.ids, run.start_s, run.end_s, source="measured", meta=meta)
