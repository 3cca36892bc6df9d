"""Plots. Each takes and returns an ``ax``; none calls show()."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from moegen.errors import InvalidInput
from moegen.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moegen.timeline import Timeline

# One hue a part of the layer: attention blue, experts orange to brown, what moves weights grey,
# KV green, small transfers violet, the ends of a step rose.
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
    "copy_expert": "#969696",
    "copy_dense": "#525252",
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
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def gantt(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    steps: int | Collection[int] | None = None,
    layers: int | Collection[int] | None = None,
) -> Axes:
    """A Gantt chart: a row a lane (GPU, CPU, BULK, KV, ACT), a colour an op.

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
    from matplotlib.patches import Patch

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
    span = float(timeline.end_s[shown].max()) - begin
    scale, unit = next(((s, u) for s, u in _UNITS if span >= 2 * s), _UNITS[-1])
    colours = _colours([timeline.ids[i].op for i in shown])
    for y, lane in enumerate(lanes):
        for op, colour in colours.items():
            members = [i for i in timeline.by_lane[lane] if i in keep and timeline.ids[i].op == op]
            if not members:
                continue
            bars = [
                (timeline.start_s[i] / scale, (timeline.end_s[i] - timeline.start_s[i]) / scale)
                for i in members
            ]
            # A white edge parts neighbours of one op, but would swallow a narrow bar.
            edges = ["white" if w * scale > 0.004 * span else colour for _, w in bars]
            ax.broken_barh(bars, (y - 0.4, 0.8), facecolors=colour, edgecolors=edges, linewidth=0.6)
            for i, (x, width) in zip(members, bars, strict=True):
                text = _text(timeline, i)
                # About 150 characters of this size go side by side on a default figure.
                if width * scale / span * 150 > len(text) + 1:
                    ax.text(
                        x + width / 2,
                        y,
                        text,
                        ha="center",
                        va="center",
                        fontsize=7,
                        color=_ink(colour),
                        clip_on=True,
                    )
    ax.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    ax.set_ylim(len(lanes) - 0.45, -0.55)
    margin = 0.005 * span or 0.5 * scale  # tasks that all take no time
    ax.set_xlim((begin - margin) / scale, (begin + span + margin) / scale)
    ax.set_xlabel(f"time [{unit}]")
    ax.set_title(_title(timeline, steps, layers), loc="left", fontsize=10)
    ax.grid(axis="x", linewidth=0.4, alpha=0.5)
    ax.set_axisbelow(True)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.legend(
        handles=[Patch(color=colour, label=op) for op, colour in colours.items()],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        fontsize=7.5,
        frameon=False,
        ncols=1 if len(colours) <= 2 + 3 * len(lanes) else 2,
        handlelength=1.2,
        labelspacing=0.25,
    )
    return ax


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


def _text(timeline: Timeline, i: int) -> str:
    task_id = timeline.ids[i]
    for letter, value in (("e", task_id.expert), ("m", task_id.microbatch)):
        if value >= 0:
            return f"{letter}{value}"
    return task_id.op


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
