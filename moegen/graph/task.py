"""Tasks, edges and the frozen graph of one step.

A :class:`TaskGraph` says *what* is to be done: tasks in program order, the lane each
one queues on, the buffer values it reads and writes, and how much work it is. It never
says how long anything takes or where a tensor lives: cost models and backends do.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import networkx as nx

from moegen.errors import GraphError
from moegen.graph.structure import Structure

if TYPE_CHECKING:
    from moegen.graph.model import ModelSpec, Phase
    from moegen.graph.shape import Shape
    from moegen.graph.strategy import Strategy


class Lane(enum.StrEnum):
    """An in-order queue: a CUDA stream or a worker thread."""

    GPU = "GPU"
    BULK = "BULK"  # weights, host to device, copy engine
    KV = "KV"  # history up and new rows down, zero-copy kernels
    ACT = "ACT"  # small transfers that someone waits for: up by zero-copy kernels
    CPU = "CPU"


class EdgeKind(enum.StrEnum):
    """Why one task waits for another."""

    DATA = "DATA"  # it reads what the other wrote
    BUFFER = "BUFFER"  # it overwrites a slot that the other still uses
    LANE = "LANE"  # it stands behind the other in the same queue


class TaskId(NamedTuple):
    """Name of a task; -1 where a field does not apply. Sorts, hashes, survives JSON."""

    op: str
    phase: Phase
    step: int = 0
    layer: int = -1
    microbatch: int = -1
    expert: int = -1

    def __str__(self) -> str:
        parts = [self.op]
        for letter, value in zip("slme", self[2:], strict=True):
            if value >= 0:
                parts.append(f"{letter}{value}")
        return f"{self.phase}:" + ".".join(parts)


class Value(NamedTuple):
    """The ``index``-th value that a step puts into ``buffer``.

    ``distance`` 1 on a read means the value of the previous step.
    """

    buffer: str
    index: int = 0
    distance: int = 0


class Reason(NamedTuple):
    """One reason for an edge: its kind, how many steps it spans, the buffer meant.

    ``host`` marks a DATA edge whose consumer needs the value on the host before it can
    even be issued (routing counts, sampled tokens).
    """

    kind: EdgeKind
    distance: int = 0
    buffer: str = ""
    host: bool = False


class Edge(NamedTuple):
    """``dst`` of step t waits for ``src`` of step t - ``reason.distance``."""

    src: TaskId
    dst: TaskId
    reason: Reason


@dataclass(frozen=True)
class Work:
    """How much a task is, in units that no machine enters.

    Attributes
    ----------
    flops : float
        Arithmetic operations, a multiply-add counted as two.
    gpu_bytes : float
        GPU memory traffic.
    h2d_bytes, d2h_bytes : float
        Bytes over the link, to and from the device.
    host_bytes : float
        Host memory traffic, that of the link transfers not included.
    tokens : float
        Rows of the matrix products, or tokens moved.
    rows : int
        Sequences taking part.
    launches : int
        Kernels or copies to launch.
    calls : int
        Of decode attention on a CPU, which takes neighbours of one length together and others
        one by one.
    """

    flops: float = 0.0
    gpu_bytes: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    host_bytes: float = 0.0
    tokens: float = 0.0
    rows: int = 0
    launches: int = 1
    calls: int = 0

    @property
    def empty(self) -> bool:
        """Nothing to do: the task is skipped, at no cost."""
        return self.launches == 0


def kernel_bytes(lane: Lane, work: Work) -> float:
    """Bytes that kernels carry over the link themselves: history up and new rows down, and what
    lane ACT brings up. All else goes through the copy engine."""
    if lane is Lane.KV:
        return work.h2d_bytes + work.d2h_bytes
    return work.h2d_bytes if lane is Lane.ACT else 0.0


NO_WORK = Work(launches=0)


@dataclass(frozen=True)
class Task:
    """A node: its name, its lane, the values it reads and writes, its work if bound."""

    id: TaskId
    lane: Lane
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    work: Work | None = None


@dataclass(frozen=True)
class Ring:
    """A buffer of ``slots`` slots that ``uses`` values a step go through in turn.

    The n-th value of a run, counted over all steps, lies in slot ``n % slots``.
    ``slots`` 0 means that the buffer is never reused (the KV store).
    """

    name: str
    slots: int
    uses: int
    slot_bytes: int = 0
    where: str = "gpu"

    def slot(self, step: int, index: int) -> int:
        """Slot of value ``index`` of ``step``."""
        return (step * self.uses + index) % self.slots if self.slots else 0


@dataclass(frozen=True)
class Layout:
    """Which rows of the batch are whose, fixed between re-plan barriers.

    Positions ``[0, cpu_rows)`` of the batch attend on the CPU; the GPU's follow in
    micro-batches of consecutive positions.
    """

    cpu_rows: int
    micro_batches: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return self.cpu_rows + sum(self.micro_batches)

    @property
    def cpu(self) -> range:
        """Batch positions that attend on the CPU."""
        return range(self.cpu_rows)

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """Batch positions of each micro-batch."""
        bounds = pairwise(accumulate(self.micro_batches, initial=self.cpu_rows))
        return tuple(range(start, stop) for start, stop in bounds)

    def micro_batch(self, m: int) -> range:
        """Batch positions of micro-batch ``m``."""
        return self.parts[m]


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """One whole step, or several unrolled ones: tasks in program order and typed edges.

    Parameters
    ----------
    tasks : sequence of Task
        In program order. Each lane runs its own tasks in this order.
    edges : sequence of Edge
        DATA, BUFFER and LANE. `moegen.graph.passes.assemble` derives them.
    rings : mapping of str to Ring
        Buffers whose slots are reused.
    phase : str
        ``"prefill"`` or ``"decode"``.
    model, strategy, layout, shape
        What the graph was built from; None for graphs made by hand.
    n_steps : int
        1 for a step's structure, n after ``unroll(n)``.

    Attributes
    ----------
    structure : Structure
        Edges and lanes in positions of tasks; the same object for every shape that is bound.
    """

    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    rings: Mapping[str, Ring] = field(default_factory=dict)
    phase: Phase = "decode"
    model: ModelSpec | None = None
    strategy: Strategy | None = None
    layout: Layout | None = None
    shape: Shape | None = None
    n_steps: int = 1
    structure: Structure = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        object.__setattr__(self, "edges", tuple(self.edges))
        object.__setattr__(self, "rings", MappingProxyType(dict(self.rings)))
        position = {t.id: i for i, t in enumerate(self.tasks)}
        if len(position) != len(self.tasks):
            raise GraphError("two tasks of the graph have the same TaskId")
        pairs: list[tuple[int, int, int]] = []
        for src, dst, reason in self.edges:
            u, v, distance = position.get(src), position.get(dst), reason.distance
            if u is None or v is None:
                raise GraphError(f"edge {src} -> {dst} names a task the graph does not have")
            if distance not in (0, 1):
                raise GraphError(f"edge {src} -> {dst} spans {distance} steps")
            pairs.append((u, v, distance))
        lanes = {lane: number for number, lane in enumerate(Lane)}
        structure = Structure(tuple(lanes[t.lane] for t in self.tasks), tuple(pairs))
        object.__setattr__(self, "structure", structure)
        # Tasks that never run wait for each other. Where only the order of a lane makes it so,
        # running the graph explains the deadlock.
        never_run = len(structure.order) < len(self.tasks)
        if never_run and not nx.is_directed_acyclic_graph(self.step_dag):
            cycle = nx.find_cycle(self.step_dag)
            raise GraphError("tasks wait for each other: " + " -> ".join(str(u) for u, _ in cycle))

    def __getitem__(self, task_id: TaskId) -> Task:
        return self._by_id[task_id]

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._by_id

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __repr__(self) -> str:
        lanes = ", ".join(f"{lane} {len(ts)}" for lane, ts in self.lanes.items())
        name = self.model.name if self.model is not None else "hand-made"
        return (
            f"<TaskGraph {name} {self.phase}: {len(self.tasks)} tasks ({lanes}), "
            f"{len(self.edges)} edges, {self.n_steps} step(s), {self.structure_hash[:12]}>"
        )

    @cached_property
    def _by_id(self) -> dict[TaskId, Task]:
        return {t.id: t for t in self.tasks}

    @cached_property
    def kinds(self) -> tuple[tuple[Task, ...], tuple[int, ...]]:
        """One task of each kind, and each task's kind, shape [n].

        Tasks are of one kind if op, phase, lane and work are the same: most layers are alike.
        """
        works: dict[Work | None, int] = {}
        seen: dict[int, int] = {}  # by identity: hashing work takes longer than all the rest
        numbers: dict[tuple[str, str, Lane, int], int] = {}
        examples: list[Task] = []
        of = []
        for t in self.tasks:
            work = seen.get(id(t.work))
            if work is None:
                work = seen[id(t.work)] = works.setdefault(t.work, len(works))
            number = numbers.setdefault((t.id.op, t.id.phase, t.lane, work), len(examples))
            if number == len(examples):
                examples.append(t)
            of.append(number)
        return tuple(examples), tuple(of)

    @cached_property
    def lanes(self) -> Mapping[Lane, tuple[Task, ...]]:
        """Each lane's tasks in the order in which it runs them."""
        queues: dict[Lane, list[Task]] = {}
        for t in self.tasks:
            queues.setdefault(t.lane, []).append(t)
        order = [lane for lane in Lane if lane in queues]
        return MappingProxyType({lane: tuple(queues[lane]) for lane in order})

    @cached_property
    def nx(self) -> nx.DiGraph:
        """The step as a frozen networkx graph.

        Nodes are TaskIds in program order with attribute ``task``; an edge's attribute
        ``reasons`` is a tuple of Reason. Edges of distance 1 point at the next step, so
        this graph may have cycles; ``step_dag`` has none.
        """
        return self._digraph(self.edges)

    @cached_property
    def step_dag(self) -> nx.DiGraph:
        """The acyclic part: edges within one step."""
        return self._digraph(e for e in self.edges if e.reason.distance == 0)

    def _digraph(self, edges: Iterable[Edge]) -> nx.DiGraph:
        g = nx.DiGraph()
        for t in self.tasks:
            g.add_node(t.id, task=t)
        for e in edges:
            if g.has_edge(e.src, e.dst):
                g.edges[e.src, e.dst]["reasons"] += (e.reason,)
            else:
                g.add_edge(e.src, e.dst, reasons=(e.reason,))
        return nx.freeze(g)

    @cached_property
    def preds(self) -> Mapping[TaskId, tuple[Edge, ...]]:
        """Incoming edges of each task, those of distance 1 included."""
        into: dict[TaskId, list[Edge]] = {t.id: [] for t in self.tasks}
        for e in self.edges:
            into[e.dst].append(e)
        return MappingProxyType({k: tuple(v) for k, v in into.items()})

    def with_tasks(self, tasks: Sequence[Task], shape: Shape | None) -> TaskGraph:
        """The same structure with other work: ``tasks`` differ in nothing else.

        Raises
        ------
        GraphError
            If they are not the graph's tasks in its order.
        """
        if [t.id for t in tasks] != [t.id for t in self.tasks]:
            raise GraphError("other work needs the graph's own tasks, in their order")
        # Not checked anew, as `replace` would: what was checked is the structure.
        g = object.__new__(TaskGraph)
        vars(g).update({f.name: vars(self)[f.name] for f in fields(self)})
        vars(g).update(tasks=tuple(tasks), shape=shape)
        return g

    def without(self, kind: EdgeKind, buffer: str) -> TaskGraph:
        """The graph less one class of edges: what a test takes out to see that it matters."""
        kept = [e for e in self.edges if (e.reason.kind, e.reason.buffer) != (kind, buffer)]
        return replace(self, edges=tuple(kept))

    def bind(self, shape: Shape) -> TaskGraph:
        """The same structure with the work of ``shape`` in each task."""
        from moegen.graph.shape import bind

        return bind(self, shape)

    def unroll(self, n: int) -> TaskGraph:
        """The DAG of ``n`` consecutive steps; every edge in it has distance 0."""
        from moegen.graph.passes import unroll

        return unroll(self, n)

    @cached_property
    def structure_hash(self) -> str:
        """SHA-256 of tasks, edges and rings, whatever the sizes."""
        from moegen.graph.io import structure_hash

        return structure_hash(self)

    @cached_property
    def shape_hash(self) -> str:
        """SHA-256 of the structure and of every task's work."""
        from moegen.graph.io import shape_hash

        return shape_hash(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        from moegen.graph.io import to_dict

        return to_dict(self)

    def to_json(self, path: str | Path) -> None:
        """Write the graph as JSON; ``from_json`` gives back an equal one."""
        from moegen.graph.io import to_json

        to_json(self, path)

    @staticmethod
    def from_json(path: str | Path) -> TaskGraph:
        """Read a graph that ``to_json`` wrote."""
        from moegen.graph.io import from_json

        return from_json(path)
