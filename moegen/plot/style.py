"""What all plots share: colours, units, and how axes look."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from moegen.graph.task import Lane

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
# What a lane is for, for those who have not read the design.
LANE_WORDS = {
    Lane.GPU: "compute",
    Lane.CPU: "attention",
    Lane.BULK: "weights to GPU",
    Lane.KV: "KV to GPU and back",
    Lane.ACT: "small transfers",
}
# Those of the ops that a lane is busy with most.
LANE_COLOURS = {
    Lane.GPU: "#f16913",
    Lane.CPU: "#08519c",
    Lane.BULK: "#d9b300",
    Lane.KV: "#41ab5d",
    Lane.ACT: "#9e9ac8",
}
FAINT = "#e9e9e9"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def op_colours(ops: Collection[str]) -> dict[str, str]:
    """Ops that occur, in the order of the layer, each with its colour."""
    present = set(ops)
    known = {op: colour for op, colour in COLOURS.items() if op in present}
    others = sorted(present - known.keys())
    return known | {op: _OTHERS[i % len(_OTHERS)] for i, op in enumerate(others)}


def ink(colour: str) -> str:
    """Black or white, whichever is read better on ``colour`` (#rrggbb)."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def time_unit(span_s: float) -> tuple[float, str]:
    """Seconds of the unit that an axis of ``span_s`` is best read in, and its name."""
    return next(((s, u) for s, u in _UNITS if span_s >= 2 * s), _UNITS[-1])


def bare(ax: Axes, *sides: str) -> None:
    """Take away the frame's ``sides`` and put the grid behind what is drawn."""
    for side in sides:
        ax.spines[side].set_visible(False)
    ax.set_axisbelow(True)


def width_in(ax: Axes) -> float:
    """Width of the axes in inches."""
    return ax.get_position().width * ax.figure.get_figure(root=True).get_size_inches()[0]


def letters(ax: Axes) -> float:
    """Small letters that fit side by side across the axes."""
    return 14 * width_in(ax)
