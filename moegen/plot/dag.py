"""The graph of one layer, drawn so that a person can read who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import networkx as nx

from moegen.errors import InvalidInput
from moegen.graph.task import EdgeKind, Lane, Task, TaskGraph, TaskId
from moegen.plot.style import LANE_WORDS, ink, op_colours
from moegen.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moegen.sim.cost import CostModel

# From top to bottom, so that most edges join neighbours: the CPU's attention goes down and up by
# ACT, the copies come from below.
_ROWS = (Lane.CPU, Lane.ACT, Lane.GPU, Lane.KV, Lane.BULK)
_KINDS = {EdgeKind.DATA: "#34495e", EdgeKind.BUFFER: "#c0392b"}
_WIDTH, _HEIGHT = 0.86, 0.44


def layer_dag(
    g: TaskGraph, layer: int = 0, ax: Axes | None = None, *, cost: CostModel | None = None
) -> Axes:
    """The tasks of one layer and the edges between them, lanes as rows, time to the right.

    Tasks of one operation are one box, "expert x 8". An arrow goes from what must end to what
    waits for it: DATA, because it reads what the other wrote, or BUFFER, because it writes to a
    slot that the other still uses. DATA arrows that follow from others are left out, and so is
    the order within a lane, which is from left to right. What a task waits for outside the layer
    stands below its box, with L for the layer.

    Parameters
    ----------
    g : TaskGraph
        Of one step.
    layer : int
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    cost : CostModel, optional
        Adds how long each box takes, its tasks one after another.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If the graph has no such layer.
    """
    import matplotlib.pyplot as plt

    drawing = _Layer(g, layer)
    n_columns = max(drawing.column.values()) + 1
    if ax is None:
        size = (1.5 + 1.03 * n_columns, 0.8 + 0.95 * len(drawing.rows))
        _, ax = plt.subplots(figsize=size, layout="constrained")
    colours = op_colours(list(drawing.members))
    for op, tasks in drawing.members.items():
        _draw_box(ax, drawing, op, colours[op], _caption(op, tasks, cost))
    for kind, pairs in drawing.arrows.items():
        for pair in pairs:
            _draw_arrow(ax, drawing, kind, *pair)
    for op, waits in drawing.outside.items():
        _draw_waits(ax, drawing.at(op), waits)
    _draw_exits(ax, drawing)
    _set_axes(ax, drawing, n_columns)
    return ax


@dataclass(frozen=True)
class _Layer:
    """What is drawn of a layer: an entry an operation, whatever the number of its tasks."""

    graph: TaskGraph
    layer: int

    def __post_init__(self) -> None:
        if not self.members:
            layers = sorted({t.id.layer for t in self.graph if t.id.layer >= 0})
            there = f"{layers[0]} to {layers[-1]}" if layers else "none"
            raise InvalidInput(f"the graph has no layer {self.layer}: its layers are {there}")

    @cached_property
    def members(self) -> dict[str, list[Task]]:
        members: dict[str, list[Task]] = {}
        for task in self.graph:
            if task.id.layer == self.layer:
                members.setdefault(task.id.op, []).append(task)
        return members

    @cached_property
    def rows(self) -> list[Lane]:
        lanes = {tasks[0].lane for tasks in self.members.values()}
        return [lane for lane in _ROWS if lane in lanes]

    def at(self, op: str) -> tuple[float, float]:
        """The middle of a box; rows go down."""
        return float(self.column[op]), float(self.rows.index(self.members[op][0].lane))

    @cached_property
    def _edges(self) -> dict[EdgeKind, list[tuple[TaskId, TaskId]]]:
        """Edges within the layer and the step, those of lanes left out."""
        kinds: dict[EdgeKind, list[tuple[TaskId, TaskId]]] = {kind: [] for kind in _KINDS}
        for e in self.graph.edges:
            inside = e.src.layer == e.dst.layer == self.layer and e.reason.distance == 0
            if inside and e.reason.kind in kinds:
                kinds[e.reason.kind].append((e.src, e.dst))
        return kinds

    @cached_property
    def arrows(self) -> dict[EdgeKind, list[tuple[str, str]]]:
        data = nx.DiGraph((a.op, b.op) for a, b in self._edges[EdgeKind.DATA] if a.op != b.op)
        if nx.is_directed_acyclic_graph(data):
            data = nx.transitive_reduction(data)
        buffers = dict.fromkeys((a.op, b.op) for a, b in self._edges[EdgeKind.BUFFER])
        return {EdgeKind.DATA: sorted(data.edges), EdgeKind.BUFFER: list(buffers)}

    @cached_property
    def column(self) -> dict[str, int]:
        """How far to the right each box stands: after all it waits for, and its lane's before."""
        depth: dict[TaskId, int] = {}
        before: dict[TaskId, list[TaskId]] = {}
        for src, dst in self._edges[EdgeKind.DATA]:
            before.setdefault(dst, []).append(src)
        ids = [t.id for tasks in self.members.values() for t in tasks]
        inside = self.graph.step_dag.subgraph(ids)
        for i in nx.lexicographical_topological_sort(inside):
            depth[i] = 1 + max((depth[u] for u in before.get(i, ())), default=0)
        first = {op: min(depth[t.id] for t in tasks) for op, tasks in self.members.items()}
        order = sorted(first, key=first.__getitem__)  # stable: program order among equals
        place = {op: i for i, op in enumerate(order)}
        ahead = nx.DiGraph()
        ahead.add_nodes_from(order)
        data = {(a.op, b.op) for a, b in self._edges[EdgeKind.DATA]}
        ahead.add_edges_from((a, b) for a, b in data if place[a] < place[b])
        for lane in self.rows:
            queue = [op for op in order if self.members[op][0].lane is lane]
            ahead.add_edges_from(zip(queue, queue[1:], strict=False))
        column: dict[str, int] = {}
        for op in order:
            column[op] = 1 + max((column[u] for u in ahead.predecessors(op)), default=-1)
        # What waits for nothing stands just before what needs it.
        for op in reversed(order):
            if not any(b == op for _, b in data) and any(a == op for a, _ in data):
                column[op] = max(column[op], min(column[v] for v in ahead.successors(op)) - 1)
        return column

    @cached_property
    def outside(self) -> dict[str, dict[EdgeKind, list[str]]]:
        """What each box waits for in other layers, or in the step before."""
        found: dict[str, dict[EdgeKind, list[str]]] = {}
        for e in self.graph.edges:
            elsewhere = e.src.layer != self.layer or e.reason.distance
            if e.dst.layer != self.layer or not elsewhere or e.reason.kind not in _KINDS:
                continue
            name = f"{e.src.op} L{e.src.layer}"
            if e.reason.distance:
                name = f"{e.src.op}, step before"
            elif e.src.layer < 0:  # the step's beginning, which says nothing of the layer
                continue
            names = found.setdefault(e.dst.op, {}).setdefault(e.reason.kind, [])
            if name not in names:
                names.append(name)
        return found

    @cached_property
    def exits(self) -> dict[str, str]:
        """Whose output goes on to a later layer, and to which."""
        later: dict[str, set[int]] = {}
        for e in self.graph.edges:
            if e.src.layer == self.layer < e.dst.layer and e.reason.kind is EdgeKind.DATA:
                later.setdefault(e.src.op, set()).add(e.dst.layer)
        return {op: f"L{min(layers)}" for op, layers in later.items()}


def _caption(op: str, tasks: list[Task], cost: CostModel | None) -> str:
    parts = [] if len(tasks) == 1 else [f"× {len(tasks)}"]
    if cost is not None:
        parts.append(format_seconds(sum(map(cost.seconds, tasks))))
    return "\n".join(filter(None, [op, ": ".join(parts)]))


def _draw_box(ax: Axes, drawing: _Layer, op: str, colour: str, caption: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = drawing.at(op)
    ax.add_patch(
        FancyBboxPatch(
            (x - _WIDTH / 2, y - _HEIGHT / 2),
            _WIDTH,
            _HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=colour,
            edgecolor="white",
            zorder=3,
        )
    )
    size = 8 if len(op) < 13 else 7
    ax.text(x, y, caption, ha="center", va="center", fontsize=size, color=ink(colour), zorder=4)


def _draw_arrow(ax: Axes, drawing: _Layer, kind: EdgeKind, src: str, dst: str) -> None:
    from matplotlib.patches import FancyArrowPatch

    (x0, y0), (x1, y1) = drawing.at(src), drawing.at(dst)
    half, data = _WIDTH / 2, kind is EdgeKind.DATA
    bend = 0.0
    if y0 == y1:
        near, far = sorted((x0, x1))
        between = any(near < x < far and y == y0 for x, y in map(drawing.at, drawing.members))
        side = half if x1 > x0 else -half
        start, end = (x0 + side, y0), (x1 - side, y1)
        if between or not data:  # over the boxes on the way, or over the arrow that goes there
            bend = -0.35 if x1 > x0 else 0.35
            start, end = (x0, y0 - _HEIGHT / 2), (x1, y1 - _HEIGHT / 2)
    else:
        down = _HEIGHT / 2 if y1 > y0 else -_HEIGHT / 2
        lean = min(0.8 * half, max(-0.8 * half, 0.3 * (x1 - x0)))
        # Beside the DATA arrow that joins the same boxes.
        away, to = (lean, lean) if data else (0.2 * lean, 1.2 * lean)
        start, end = (x0 + away, y0 + down), (x1 - to, y1 - down)
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            shrinkA=0,
            shrinkB=1,
            connectionstyle=f"arc3,rad={bend}",
            color=_KINDS[kind],
            linewidth=1.2,
            linestyle="-" if data else (0, (4, 2)),
            zorder=2,
        )
    )


def _draw_waits(ax: Axes, at: tuple[float, float], waits: Mapping[EdgeKind, Iterable[str]]) -> None:
    x, y = at
    lines = [(kind, name) for kind in _KINDS for name in waits.get(kind, ())]
    for i, (kind, name) in enumerate(lines):
        ax.annotate(
            name,
            (x, y + _HEIGHT / 2),
            (0, -2 - 7.5 * i),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=6.5,
            color=_KINDS[kind],
            zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85},
        )


def _draw_exits(ax: Axes, drawing: _Layer) -> None:
    for op, layer in drawing.exits.items():
        x, y = drawing.at(op)
        ax.annotate(
            f"to {layer}",
            (x + _WIDTH / 2, y),
            (x + _WIDTH / 2 + 0.3, y),
            ha="left",
            va="center",
            fontsize=7,
            color=_KINDS[EdgeKind.DATA],
            arrowprops={"arrowstyle": "<|-", "color": _KINDS[EdgeKind.DATA], "lw": 1.2},
        )


def _set_axes(ax: Axes, drawing: _Layer, n_columns: int) -> None:
    from matplotlib.lines import Line2D

    for y in range(len(drawing.rows)):
        end = y + (0.48 if y < len(drawing.rows) - 1 else 0.78)  # with what the last waits for
        ax.axhspan(y - 0.48, end, color="#f4f4f4" if y % 2 else "#fafafa", lw=0, zorder=0)
    names = [f"{lane.value}\n{LANE_WORDS[lane]}" for lane in drawing.rows]
    ax.set_yticks(range(len(drawing.rows)), names, fontsize=8)
    ax.set_xticks([])
    ax.set_xlim(-0.6, n_columns + 0.05)
    ax.set_ylim(len(drawing.rows) - 0.2, -0.5)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    model = drawing.graph.model
    name = model.name if model is not None else "hand-made"
    title = f"{name} {drawing.graph.phase}, layer {drawing.layer}"
    ax.set_title(title, loc="left", fontsize=10)
    words = {
        EdgeKind.DATA: "needs its output",
        EdgeKind.BUFFER: "needs its slot",
    }
    ax.legend(
        handles=[
            Line2D([], [], color=c, ls="-" if kind is EdgeKind.DATA else "--", label=label)
            for kind, c in _KINDS.items()
            for label in [f"{kind.value}: {words[kind]}"]
        ]
        + [Line2D([], [], ls="", label="small: what else it waits for, in other layers")],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=3,
        fontsize=7.5,
        frameon=False,
        borderaxespad=0.2,
    )
