"""Plots. Each takes and returns an ``ax``; none calls show()."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from moegen.errors import InvalidInput
from moegen.graph.task import Lane
from moegen.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moegen.timeline import Timeline

# One hue a part of the layer: attention blue, experts orange to brown, what moves weights yellow,
# KV green, small transfers violet, the ends of a step rose. Grey is what was not selected.
COLOURS = {
    "pre_attn": "#9ecae1",
    "attn_gpu": "#3182bd",
    "attn_prefill": "#3182bd",
    "attn_cpu": "#08519c",
    "post_attn": "#6baed6",
    "route": "#fdd0a2",
    "expert": "#f16913",
    "shared_expert": "#fdae6b",
    "dense_mlp": "#d94801",
    "combine": "#8c2d04",
    "copy_expert": "#f6d155",
    "copy_dense": "#a38300",
    "fetch_kv": "#41ab5d",
    "append_kv": "#a1d99b",
    "send_qkv": "#9e9ac8",
    "recv_attn": "#6a51a3",
    "copy_counts": "#c994c7",
    "copy_rows": "#dadaeb",
    "copy_tokens": "#dd1c77",
    "embed": "#fa9fb5",
    "lm_head": "#c51b8a",
    "sample": "#7a0177",
}
_OTHERS = ("#1b9e77", "#e6ab02", "#66a61e", "#a6761d", "#e7298a", "#7570b3")
_FAINT = "#e9e9e9"
# What a lane is for, for those who have not read the design.
_ABOUT = {
    Lane.GPU: "compute",
    Lane.CPU: "attention",
    Lane.BULK: "weights to GPU",
    Lane.KV: "KV to GPU and back",
    Lane.ACT: "small transfers",
}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def gantt(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    steps: int | Collection[int] | None = None,
    layers: int | Collection[int] | None = None,
) -> Axes:
    """A Gantt chart: a row a lane (GPU, CPU, BULK, KV, ACT), a colour an op.

    Under each lane's name stands what it does and how busy it is in the time shown, other
    steps and layers included: they are drawn in a faint grey, so that a lane at work on the
    next layer does not look idle, with the number of their layer where there is room.

    Parameters
    ----------
    timeline : Timeline
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    steps, layers : int or collection of int, optional
        Which ones to show; all by default. Tasks outside any layer have layer -1.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If no task is left to show.
    """
    import matplotlib.pyplot as plt

    shown = [
        i
        for i, task_id in enumerate(timeline.ids)
        if _among(task_id.step, steps) and _among(task_id.layer, layers)
    ]
    if not shown:
        raise InvalidInput(f"no task in steps {steps} and layers {layers}: nothing to plot")
    keep = set(shown)
    lanes = [lane for lane, members in timeline.by_lane.items() if not keep.isdisjoint(members)]
    if ax is None:
        _, ax = plt.subplots(figsize=(13, 1.6 + 0.62 * len(lanes)), layout="constrained")

    begin = float(timeline.start_s[shown].min())
    end = float(timeline.end_s[shown].max())
    span = end - begin
    scale, unit = next(((s, u) for s, u in _UNITS if span >= 2 * s), _UNITS[-1])
    colours = _colours([timeline.ids[i].op for i in shown])
    faint = False
    many = len({(timeline.ids[i].step, timeline.ids[i].layer) for i in shown}) > 1
    for y, lane in enumerate(lanes):
        members = timeline.by_lane[lane]
        others = [
            i
            for i in members
            if i not in keep and timeline.end_s[i] > begin and timeline.start_s[i] < end
        ]
        if others:
            faint = True
            width = (timeline.end_s[others] - timeline.start_s[others]) / scale
            ax.barh(y, width, 0.8, timeline.start_s[others] / scale, color=_FAINT, zorder=0.5)
            _draw_layers(ax, y, timeline, others, scale, (begin, end))
        drawn = [i for i in members if i in keep]
        _draw_bars(ax, y, timeline, drawn, colours, scale, span)
        _draw_texts(ax, y, timeline, drawn, colours, scale, span, many=many)
        busy = _busy_s(timeline, members, begin, end) / span if span else 0.0
        ax.annotate(
            f"{_ABOUT[lane]}\n{busy:.0%} busy",
            (0, y),
            (-8, -7),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=6.5,
            color="#555555",
        )
    ax.set_yticks(range(len(lanes)), [lane.value for lane in lanes], va="bottom")
    ax.set_ylim(len(lanes) - 0.45, -0.55)
    margin = 0.005 * span or 0.5 * scale  # tasks that all take no time
    ax.set_xlim((begin - margin) / scale, (end + margin) / scale)
    ax.set_xlabel(f"time [{unit}]")
    ax.set_title(_title(timeline, steps, layers), loc="left", fontsize=10)
    ax.grid(axis="x", linewidth=0.4, alpha=0.5)
    ax.set_axisbelow(True)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    _draw_legend(ax, colours | ({"(not selected)": _FAINT} if faint else {}), len(lanes))
    return ax


def _draw_bars(
    ax: Axes,
    y: int,
    timeline: Timeline,
    drawn: Sequence[int],
    colours: Mapping[str, str],
    scale: float,
    span: float,
) -> None:
    for op, colour in colours.items():
        members = [i for i in drawn if timeline.ids[i].op == op]
        if not members:
            continue
        start_s, end_s = timeline.start_s[members], timeline.end_s[members]
        bars = list(zip(start_s / scale, (end_s - start_s) / scale, strict=True))
        # A white edge parts neighbours of one op, but would swallow a narrow bar.
        edges = ["white" if w * scale > 0.004 * span else colour for _, w in bars]
        ax.broken_barh(bars, (y - 0.4, 0.8), facecolors=colour, edgecolors=edges, linewidth=0.6)


def _draw_texts(
    ax: Axes,
    y: int,
    timeline: Timeline,
    drawn: Sequence[int],
    colours: Mapping[str, str],
    scale: float,
    span: float,
    *,
    many: bool,
) -> None:
    """Name each bar that is wide enough; a row of narrow ones gets one name for all.

    With ``many`` layers in view a name without its layer would be read as its neighbour's.
    """
    letters = _letters(ax)
    for run in _runs(timeline, drawn, span):
        alone = [_fitting(timeline, i, i, letters / span, many) if span else "" for i in run]
        if any(alone):
            named = [(i, i, text) for i, text in zip(run, alone, strict=True)]
        else:
            text = _fitting(timeline, run[0], run[-1], letters / span, many) if span else ""
            named = [(run[0], run[-1], text)]
        for first, last, text in named:
            if text:
                colour = colours[timeline.ids[first].op]
                ax.text(
                    (timeline.start_s[first] + timeline.end_s[last]) / 2 / scale,
                    y,
                    text,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=_ink(colour),
                    clip_on=True,
                    # Over a row of bars it hides their edges, or it could not be read.
                    bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.5},
                )


def _draw_layers(
    ax: Axes,
    y: int,
    timeline: Timeline,
    others: Sequence[int],
    scale: float,
    window: tuple[float, float],
) -> None:
    """Write the layer on what was not selected, where the part in view has room for it."""
    begin, end = window
    span = end - begin
    groups: list[list[int]] = []
    for i in others:
        if groups:
            last = groups[-1][-1]
            a, b = timeline.ids[last], timeline.ids[i]
            touch = timeline.start_s[i] - timeline.end_s[last] < 1e-3 * span
            if touch and (a.step, a.layer) == (b.step, b.layer):
                groups[-1].append(i)
                continue
        groups.append([i])
    for group in groups:
        left = max(begin, float(timeline.start_s[group[0]]))
        right = min(end, float(timeline.end_s[group[-1]]))
        layer = timeline.ids[group[0]].layer
        text = f"L{layer}" if layer >= 0 else timeline.ids[group[0]].op
        if span and len(text) < (right - left) * _letters(ax) / span - 1:
            middle = (left + right) / 2 / scale
            ax.text(middle, y, text, ha="center", va="center", fontsize=7, color="#777777")


def _letters(ax: Axes) -> float:
    """Letters of a bar's name that fit side by side across the axes."""
    figure_in = ax.figure.get_figure(root=True).get_size_inches()[0]
    return 14 * ax.get_position().width * figure_in


def _runs(timeline: Timeline, drawn: Sequence[int], span: float) -> list[list[int]]:
    """Tasks of one lane in groups: neighbours of one op, step and layer that touch."""
    runs: list[list[int]] = []
    for i in drawn:
        if runs:
            j = runs[-1][-1]
            a, b = timeline.ids[j], timeline.ids[i]
            alike = (a.op, a.step, a.layer) == (b.op, b.step, b.layer)
            if alike and abs(timeline.start_s[i] - timeline.end_s[j]) < 1e-3 * span:
                runs[-1].append(i)
                continue
        runs.append([i])
    return runs


def _fitting(timeline: Timeline, first: int, last: int, letters_per_s: float, many: bool) -> str:
    """The most telling name of tasks ``first`` to ``last`` that their width has room for."""
    room = (timeline.end_s[last] - timeline.start_s[first]) * letters_per_s - 1
    return next((text for text in _texts(timeline, first, last, many) if len(text) < room), "")


def _texts(timeline: Timeline, first: int, last: int, many: bool) -> list[str]:
    """Names of a task, or of a row of them: the longest first."""
    a, b = timeline.ids[first], timeline.ids[last]
    layer = f"L{a.layer}" if a.layer >= 0 else ""
    part = ""
    for letter, lo, hi in (("e", a.expert, b.expert), ("m", a.microbatch, b.microbatch)):
        if lo >= 0:
            part = f"{letter}{lo}" if lo == hi else f"{letter}{lo}-{hi}"
            break
    choices = [(a.op, layer, part), (layer, part) if part else (a.op,)]
    if not (part and layer and many):
        choices.append((part or a.op,))
    elif first != last:
        choices.append((layer,))
    return [" ".join(filter(None, words)) for words in choices]


def _busy_s(timeline: Timeline, members: Sequence[int], begin: float, end: float) -> float:
    """Seconds of [begin, end] in which a lane ran something; overlaps count once."""
    busy, until = 0.0, begin
    for i in members:
        stop = min(float(timeline.end_s[i]), end)
        busy += max(0.0, stop - max(float(timeline.start_s[i]), until))
        until = max(until, stop)
    return busy


def _draw_legend(ax: Axes, colours: Mapping[str, str], n_lanes: int) -> None:
    from matplotlib.patches import Patch

    ax.legend(
        handles=[Patch(color=colour, label=op) for op, colour in colours.items()],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        fontsize=7.5,
        frameon=False,
        ncols=1 if len(colours) <= 2 + 3 * n_lanes else 2,
        handlelength=1.2,
        labelspacing=0.25,
    )


def _among(value: int, chosen: int | Collection[int] | None) -> bool:
    if chosen is None:
        return True
    return value == chosen if isinstance(chosen, int) else value in chosen


def _colours(ops: Collection[str]) -> dict[str, str]:
    """Ops that occur, in the order of the layer, each with its colour."""
    present = set(ops)
    known = {op: colour for op, colour in COLOURS.items() if op in present}
    others = sorted(present - known.keys())
    return known | {op: _OTHERS[i % len(_OTHERS)] for i, op in enumerate(others)}


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _title(timeline: Timeline, *chosen: int | Collection[int] | None) -> str:
    model = timeline.graph.model
    name = f"{model.name} " if model is not None else ""
    text = f"{name}{timeline.graph.phase}, {timeline.source}: {format_seconds(timeline.makespan_s)}"
    n = len(timeline.steps)
    if n > 1:
        text += f" for {n} steps, {format_seconds(timeline.period_s)} a step"
    for name, which in zip(("step", "layer"), chosen, strict=True):
        if which is not None:
            listed = [which] if isinstance(which, int) else sorted(which)
            text += f"; {name} {', '.join(map(str, listed))}"
    return text
