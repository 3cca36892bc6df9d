"""What a step keeps busy, and what it moves: bars of utilization and of traffic."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from moegen.errors import InvalidInput
from moegen.graph.task import Work
from moegen.parts import PARTS
from moegen.plot.style import LANE_COLOURS, LANE_WORDS, bare, ink, letters, op_colours
from moegen.timeline import SOURCES, Timeline
from moegen.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moegen.sim.cost import CostModel

_RESOURCE_COLOUR = "#7f8c8d"
# The resources that bytes are drawn from; time on GPU and CPU is that of their lanes.
_RESOURCES = {
    "h2d": PARTS["resource h2d"].short,
    "d2h": PARTS["resource d2h"].short,
    "host_memory": PARTS["resource host_memory"].short,
}


def utilization(
    timeline: Timeline, ax: Axes | None = None, *, cost: CostModel | None = None
) -> Axes:
    """How busy each lane is, in the share of a step's time, and the GB/s that it moves.

    Parameters
    ----------
    timeline : Timeline
        Of several steps, those that its ``period_s`` is the mean of.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    cost : CostModel, optional
        Adds what lanes share, each direction of the link and host memory: how much of its rate
        is used.

    Returns
    -------
    matplotlib.axes.Axes
    """
    import matplotlib.pyplot as plt

    begin_s, end_s = timeline.counted_window_s
    span_s = end_s - begin_s
    if not span_s > 0:
        raise InvalidInput("the timeline takes no time: there is no share of it to plot")
    steps = set(timeline.counted_steps)
    names, shares, notes, colours = [], [], [], []
    for lane, members in timeline.by_lane.items():
        own = [timeline.work_done[i] for i in members if timeline.ids[i].step in steps]
        moved = sum(w.h2d_bytes + w.d2h_bytes for w in own if w is not None)
        busy = sum(b - a for a, b in timeline.spans_s(members, begin_s, end_s))
        names.append(f"{lane.value}: {LANE_WORDS[lane]}")
        shares.append(busy / span_s)
        notes.append(f", {moved / span_s / 1e9:.3g} GB/s" if moved else "")
        colours.append(LANE_COLOURS[lane])
    rates = {} if cost is None else cost.capacities()
    # Where company was measured host memory is what the CPU gets of it.
    in_company = cost is not None and bool(cost.company)
    for name, label in _RESOURCES.items():
        if name in rates:
            rate = rates[name]
            used = sum(_of(name, w, not in_company) for w in _works(timeline)) / span_s
            names.append(label)
            shares.append(used / rate)
            notes.append(f", {used / 1e9:.3g} of {rate / 1e9:.3g} GB/s")
            colours.append(_RESOURCE_COLOUR)
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 0.9 + 0.36 * len(names)), layout="constrained")
    ax.barh(names, [100 * share for share in shares], color=colours, height=0.72)
    for y, (share, note) in enumerate(zip(shares, notes, strict=True)):
        inside = share > 0.6
        ax.text(
            100 * share + (-1 if inside else 1),
            y,
            f"{share:.0%}{note}",
            ha="right" if inside else "left",
            va="center",
            fontsize=8.5,
            color=ink(colours[y]) if inside else "black",
        )
    ax.set_xlim(0, 100)
    ax.set_xlabel(f"busy, % of {format_seconds(timeline.period_s)} a step")
    ax.set_title(f"{timeline.name}, {SOURCES[timeline.source]}", loc="left", fontsize=10)
    _finish(ax)
    return ax


def traffic(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Bytes that a step moves over each direction of the link and through host memory, by op.

    Copies read or write host memory too, so their bytes are in both bars.

    Parameters
    ----------
    timeline : Timeline
        Of several steps, the mean of those that its ``period_s`` is the mean of.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If the timeline's graph has no work, or moves nothing.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    steps = set(timeline.counted_steps)
    moved: dict[str, dict[str, float]] = {name: defaultdict(float) for name in _RESOURCES}
    for task_id, work in zip(timeline.ids, timeline.work_done, strict=True):
        if work is None:
            raise InvalidInput(f"{task_id} has no work: give the graph a shape with g.bind(shape)")
        for name in _RESOURCES if task_id.step in steps else ():
            moved[name][task_id.op] += _of(name, work) / len(steps)
    most = max(sum(ops.values()) for ops in moved.values())
    if not most:
        raise InvalidInput("no task moves bytes over the link or in host memory")
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
    ax.set_xlim(0, 1.12 * most / 1e9)
    colours = op_colours({op for ops in moved.values() for op, n in ops.items() if n})
    room = letters(ax) / (1.12 * most)
    shown: set[str] = set()
    for y, ops in enumerate(moved.values()):
        left = 0.0
        for op, colour in colours.items():
            n = ops.get(op, 0.0)
            if n < 2e-3 * most:  # thinner than a line
                left += n
                continue
            shown.add(op)
            ax.barh(y, n / 1e9, 0.72, left / 1e9, color=colour, edgecolor="white", linewidth=0.6)
            for text in (f"{op} {n / 1e9:.3g}", f"{n / 1e9:.3g}"):
                if len(text) + 1 < n * room:
                    middle = (left + n / 2) / 1e9
                    ax.text(middle, y, text, ha="center", va="center", color=ink(colour), size=7.5)
                    break
            left += n
        ax.text(left / 1e9, y, f" {left / 1e9:.3g} GB", ha="left", va="center", fontsize=8.5)
    ax.set_yticks(range(len(moved)), [_RESOURCES[name] for name in moved])
    ax.set_xlabel("GB a step")
    ax.set_title(f"{timeline.name}: traffic of a step", loc="left", fontsize=10)
    ax.legend(
        handles=[Patch(color=c, label=op) for op, c in colours.items() if op in shown],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        fontsize=7.5,
        frameon=False,
        handlelength=1.2,
    )
    _finish(ax)
    return ax


def _works(timeline: Timeline) -> list[Work]:
    """Work of the tasks of the steps that count."""
    steps = set(timeline.counted_steps)
    done = zip(timeline.ids, timeline.work_done, strict=True)
    return [work for task_id, work in done if work is not None and task_id.step in steps]


def _of(resource: str, work: Work, copies_too: bool = True) -> float:
    if resource == "host_memory":
        return work.host_bytes + copies_too * (work.h2d_bytes + work.d2h_bytes)
    return work.h2d_bytes if resource == "h2d" else work.d2h_bytes


def _finish(ax: Axes) -> None:
    ax.invert_yaxis()
    ax.grid(axis="x", linewidth=0.4, alpha=0.5)
    ax.tick_params(axis="y", length=0)
    bare(ax, "top", "right", "left")
