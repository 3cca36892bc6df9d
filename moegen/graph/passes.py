"""From a list of tasks to a graph, and from one step to many.

The builder only says what each task reads and writes. Every edge follows from that:
a reader waits for the writers of its value (DATA), a writer waits until the slot it
takes is no longer used (BUFFER), a task waits for the one before it in its lane (LANE).
Limits of memory are edges, so a simulator and an executor obey the same ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx

from moegen.errors import GraphError
from moegen.graph.checks import whole
from moegen.graph.ops import OPS
from moegen.graph.task import Edge, EdgeKind, Lane, Reason, Ring, Task, TaskGraph, TaskId, Value


def assemble(
    tasks: Sequence[Task],
    rings: Mapping[str, Ring],
    *,
    host_values: Iterable[str] = (),
    **meta: Any,
) -> TaskGraph:
    """Derive every edge of a step and freeze the graph.

    Parameters
    ----------
    tasks : sequence of Task
        In program order.
    rings : mapping of str to Ring
        Slots of each buffer that crosses lanes. A buffer without a ring stays within
        one lane, whose order protects it.
    host_values : iterable of str
        Buffers whose readers need the value on the host before they can be issued.
    **meta
        Passed on to TaskGraph.

    Raises
    ------
    GraphError
        If a value is read and never written, or a buffer that crosses lanes has no ring.
    """
    writers: dict[tuple[str, int], list[Task]] = defaultdict(list)
    readers: dict[tuple[str, int], list[Task]] = defaultdict(list)
    readers_after: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for t in tasks:
        for v in t.writes:
            writers[v.buffer, v.index].append(t)
        for v in t.reads:
            (readers_after if v.distance else readers)[v.buffer, v.index].append(t)
    edges = [
        *_data_edges(tasks, writers, frozenset(host_values)),
        *_buffer_edges(readers, readers_after, writers, rings),
        *_lane_edges(tasks),
    ]
    return TaskGraph(tuple(tasks), tuple(dict.fromkeys(edges)), rings, **meta)


def _data_edges(
    tasks: Sequence[Task],
    writers: Mapping[tuple[str, int], list[Task]],
    host_values: frozenset[str],
) -> Iterable[Edge]:
    position = {t.id: i for i, t in enumerate(tasks)}
    for t in tasks:
        for v in t.reads:
            sources = writers.get((v.buffer, v.index))
            if not sources:
                raise GraphError(f"{t.id} reads {v.buffer}[{v.index}], which no task writes")
            host = v.buffer in host_values and OPS[t.id.op].host_reads
            reason = Reason(EdgeKind.DATA, v.distance, v.buffer, host)
            for u in sources:
                if u is t:
                    continue
                if v.distance == 0 and position[u.id] > position[t.id]:
                    raise GraphError(f"{t.id} reads {v.buffer}[{v.index}] before {u.id} writes it")
                yield Edge(u.id, t.id, reason)


def _buffer_edges(
    readers: Mapping[tuple[str, int], list[Task]],
    readers_after: Mapping[tuple[str, int], list[Task]],
    writers: Mapping[tuple[str, int], list[Task]],
    rings: Mapping[str, Ring],
) -> Iterable[Edge]:
    lanes: dict[str, set[Lane]] = defaultdict(set)
    for side in (readers, readers_after, writers):
        for (buffer, _), tasks in side.items():
            lanes[buffer].update(t.lane for t in tasks)
    for buffer, used_by in lanes.items():
        if len(used_by) > 1 and buffer not in rings:
            raise GraphError(
                f"buffer {buffer} crosses lanes {', '.join(sorted(used_by))} "
                f"without a ring of slots"
            )
    for ring in rings.values():
        if ring.slots == 0 or len(lanes[ring.name]) <= 1:
            continue
        if ring.slots > ring.uses:
            raise GraphError(f"{ring.name} has {ring.slots} slots for {ring.uses} uses a step")
        for n in range(ring.uses):
            # The value that takes the slot of value n next, so many steps later.
            distance, after = divmod(n + ring.slots, ring.uses)
            # Every reader has waited for all writers, so the readers stand for them too.
            last = readers.get((ring.name, n)) or writers[ring.name, n]
            for w in writers[ring.name, after]:
                for u in last:
                    if u is not w:
                        yield Edge(u.id, w.id, Reason(EdgeKind.BUFFER, distance, ring.name))
                for u in readers_after.get((ring.name, n), ()):
                    if distance == 0:
                        raise GraphError(
                            f"{u.id} reads {ring.name}[{n}] of the step before, which "
                            f"{w.id} has overwritten by then: give {ring.name} {ring.uses} slots"
                        )
                    if u is not w:
                        yield Edge(u.id, w.id, Reason(EdgeKind.BUFFER, 0, ring.name))


def with_slots(g: TaskGraph, buffer: str, slots: int) -> TaskGraph:
    """The graph of a step with so many slots in one ring: only its BUFFER edges change.

    Raises
    ------
    GraphError
        If the graph is unrolled or has no such ring, or a step does not use so many slots.
    """
    if g.n_steps != 1:
        raise GraphError("slots are those of a step: change them before unrolling it")
    if buffer not in g.rings:
        raise GraphError(f"no ring is called {buffer!r}: there are {', '.join(sorted(g.rings))}")
    ring = replace(g.rings[buffer], slots=whole(slots, "slots", at_least=1))
    sides: list[dict[tuple[str, int], list[Task]]] = [defaultdict(list) for _ in range(3)]
    readers, readers_after, writers = sides
    for t in g.tasks:
        for v in t.writes:
            if v.buffer == buffer:
                writers[buffer, v.index].append(t)
        for v in t.reads:
            if v.buffer == buffer:
                (readers_after if v.distance else readers)[buffer, v.index].append(t)
    kept = [e for e in g.edges if (e.reason.kind, e.reason.buffer) != (EdgeKind.BUFFER, buffer)]
    changed = _buffer_edges(readers, readers_after, writers, {buffer: ring})
    edges = (*kept, *dict.fromkeys(changed))
    return replace(g, edges=edges, rings={**g.rings, buffer: ring})


def _lane_edges(tasks: Sequence[Task]) -> Iterable[Edge]:
    queues: dict[Lane, list[Task]] = defaultdict(list)
    for t in tasks:
        queues[t.lane].append(t)
    for queue in queues.values():
        for u, v in zip(queue, queue[1:], strict=False):
            yield Edge(u.id, v.id, Reason(EdgeKind.LANE))
        yield Edge(queue[-1].id, queue[0].id, Reason(EdgeKind.LANE, 1))


def unroll(g: TaskGraph, n: int) -> TaskGraph:
    """The DAG of ``n`` consecutive steps.

    Tasks of step k carry ``step=k``; an edge of distance 1 leads from step k to k + 1,
    and is absent where there is no step before.
    """
    if g.n_steps != 1:
        raise GraphError(f"the graph is already unrolled over {g.n_steps} steps")
    n = whole(n, "the number of steps", at_least=1)

    def at(task_id: TaskId, k: int) -> TaskId:
        return task_id._replace(step=k)

    def shift(values: tuple[Value, ...], k: int, uses: Mapping[str, int]) -> tuple[Value, ...]:
        return tuple(
            Value(v.buffer, v.index + (k - v.distance) * uses[v.buffer], 0)
            for v in values
            if k >= v.distance
        )

    uses: dict[str, int] = defaultdict(int)
    for t in g.tasks:
        for v in (*t.writes, *t.reads):
            uses[v.buffer] = max(uses[v.buffer], v.index + 1)
    for ring in g.rings.values():
        uses[ring.name] = ring.uses
    tasks = [
        replace(t, id=at(t.id, k), reads=shift(t.reads, k, uses), writes=shift(t.writes, k, uses))
        for k in range(n)
        for t in g.tasks
    ]
    edges = [
        Edge(at(e.src, k - e.reason.distance), at(e.dst, k), e.reason._replace(distance=0))
        for k in range(n)
        for e in g.edges
        if k >= e.reason.distance
    ]
    rings = {name: replace(r, uses=r.uses * n) for name, r in g.rings.items()}
    return replace(g, tasks=tuple(tasks), edges=tuple(edges), rings=rings, n_steps=n)


def needed_edges(g: TaskGraph, steps: int = 3) -> set[tuple[TaskId, TaskId]]:
    """Pairs of tasks in the transitive reduction of the graph unrolled over ``steps``.

    An edge outside it is implied by others: taking it out changes nothing.
    """
    dag = unroll(g, steps).step_dag if g.n_steps == 1 else g.step_dag
    return set(nx.transitive_reduction(dag).edges)


def buffer_edges(g: TaskGraph, steps: int = 3) -> dict[str, bool]:
    """For each buffer with BUFFER edges: whether any of them is needed, not implied.

    A needed edge is one of the unrolled graph's transitive reduction whose only reasons
    are of this buffer.
    """
    dag = unroll(g, steps).step_dag if g.n_steps == 1 else g.step_dag
    reduced = nx.transitive_reduction(dag)
    found: dict[str, bool] = {}
    for u, v, reasons in dag.edges(data="reasons"):
        buffers = {r.buffer for r in reasons if r.kind is EdgeKind.BUFFER}
        for b in buffers:
            alone = all(r.kind is EdgeKind.BUFFER and r.buffer == b for r in reasons)
            found[b] = found.get(b, False) or (alone and reduced.has_edge(u, v))
    return found
