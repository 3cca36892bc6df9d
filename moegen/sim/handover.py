"""What the executor's issuing thread waits for before it hands a task over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from moegen.graph.structure import Structure
from moegen.graph.task import EdgeKind, Lane, TaskGraph


class Wait(NamedTuple):
    """What must be so before a task is handed over.

    Attributes
    ----------
    at : int
        Position of another task, less n for each step that it is before this one.
    ends : bool
        Whether the other must have ended, and the thread noticed; otherwise it is enough that
        it has been handed over.
    binds : bool
        Whether that tells what this task's step is.
    """

    at: int
    ends: bool
    binds: bool


class Rules(NamedTuple):
    """When tasks of a step may be handed over, by position.

    Attributes
    ----------
    waits : sequence of sequence of Wait
    streamed : sequence of sequence of int
        Of these the ones that a task's stream waits for by itself, as ``Wait.at``.
    needs : sequence of int
        Steps of the graph that must have been bound: for a copy of weights only those before.
    steps : sequence of int
        The step that a task is of within the graph.
    from_cpu : mapping of int to bool
        Whose ends the thread waits for, and whether they are of the CPU lane.
    binds : bool
        Whether steps depend on those before; those of graphs made by hand may not.
    """

    waits: Sequence[Sequence[Wait]]
    streamed: Sequence[Sequence[int]]
    needs: Sequence[int]
    steps: Sequence[int]
    from_cpu: Mapping[int, bool]
    binds: bool


# Graphs that differ in their shape alone share a structure.
_KNOWN: WeakKeyDictionary[Structure, Rules] = WeakKeyDictionary()


def rules(g: TaskGraph) -> Rules:
    """Those of a graph; worked out once for each structure."""
    known = _KNOWN.get(g.structure)
    if known is None:
        known = _KNOWN[g.structure] = _rules_of(g)
    return known


def _rules_of(g: TaskGraph) -> Rules:
    """Of each lane, distance and way of waiting only the last task is waited for: lanes are in
    order."""
    place = {t.id: i for i, t in enumerate(g.tasks)}
    lanes = [t.lane for t in g.tasks]
    steps = [t.id.step if g.n_steps > 1 else 0 for t in g.tasks]
    found: list[dict[tuple[Lane, int, bool], Wait]] = [{} for _ in g.tasks]
    from_cpu: dict[int, bool] = {}
    reads = bytearray(len(g))
    for src, dst, (kind, distance, _, host) in g.edges:
        u, v = place[src], place[dst]
        of, to = lanes[u], lanes[v]
        if kind is EdgeKind.LANE or (of is to and not host):
            continue
        ends = host or (of is Lane.CPU and to is not Lane.CPU)
        if ends:
            from_cpu[u] = of is Lane.CPU
        reads[v] |= host
        # In an unrolled graph it is ids that tell steps apart.
        apart = distance + steps[v] - steps[u]
        wait = Wait(u - distance * len(g), ends, host and apart > 0)
        known = found[v].get((of, apart, host))
        if known is None or known.at < wait.at:
            found[v][of, apart, host] = wait
    waits = [[wait for _, wait in sorted(of.items())] for of in found]
    return Rules(
        waits=waits,
        streamed=[[wait.at for wait in of if not wait.ends] for of in waits],
        # Weights that are copied whoever is chosen need nothing on the host.
        needs=[
            k if lane is Lane.BULK and not read else k + 1
            for k, lane, read in zip(steps, lanes, reads, strict=True)
        ],
        steps=steps,
        from_cpu=from_cpu,
        binds=any(w.binds for waits in found for w in waits.values()),
    )
