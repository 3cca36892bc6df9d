"""Predicted against measured in pictures: the time of a step, the curve over ω, and delays."""

from __future__ import annotations

from collections.abc import Sequence

import judge
import pandas as pd
from judge import Data
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, NullFormatter

import moegen as mg

COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")
_LIMITS = ((judge.WORST, 0.10), (judge.MEDIAN, 0.16))
_LINE, _BAND = "#333333", "#1f3b57"


def predicted_and_measured(
    points: Sequence[Data], axes: Sequence[Axes] | None = None
) -> tuple[Axes, Axes]:
    """On the left predicted over measured, both logarithmic; on the right the error.

    Bands are of 3% and 6%. A bar goes from the quickest run of a point, where the mark is, to its
    slowest. Filled marks are points drawn at random, empty ones the curve's and the planner's.

    Parameters
    ----------
    points : sequence of dict
        Of predicted.json, at least one.
    axes : sequence of matplotlib.axes.Axes, length 2, optional
        Where to draw; a new figure by default.

    Returns
    -------
    tuple of matplotlib.axes.Axes
    """
    left, right = _two(axes, 4.6)
    kinds = list(dict.fromkeys((p["model"], p["phase"]) for p in points))
    drawn = {p["name"] for p in judge.held_out(points)}
    for i, kind in enumerate(kinds):
        colour = COLOURS[i % len(COLOURS)]
        for p in points:
            if (p["model"], p["phase"]) != kind:
                continue
            face = colour if p["name"] in drawn else "white"
            look = {"fmt": "o", "ms": 5, "mfc": face, "mec": colour, "ecolor": colour, "lw": 1}
            at, slowest_s = 1e3 * p["measured_s"], max(p["runs_s"])
            late = [[0], [1e3 * slowest_s - at]]
            left.errorbar(at, 1e3 * p["predicted_s"], xerr=late, **look)
            down = [[100 * (p["error"] - (p["predicted_s"] / slowest_s - 1))], [0]]
            right.errorbar(at, 100 * p["error"], yerr=down, **look)
        left.plot([], [], "o", color=colour, label=" ".join(kind))
    _bands(left, right, points)
    left.set_ylabel("predicted, ms a step")
    left.legend(loc="upper left", fontsize=8.5, frameon=False)
    right.set_ylabel("error of the prediction, %")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_xlabel("measured, ms a step")
        ax.grid(which="both", linewidth=0.4, alpha=0.4)
        ax.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        _plain(axis)
    left.set_title("The time of a step; shaded: within 3% and 6%", loc="left", fontsize=10)
    words = "Bars: to the slowest run. Empty marks: not drawn at random"
    right.set_title(words, loc="left", fontsize=10)
    return left, right


def _two(axes: Sequence[Axes] | None, height: float) -> Sequence[Axes]:
    """The axes given, or two side by side in a new figure, so many inches high."""
    import matplotlib.pyplot as plt

    if axes is not None:
        return axes
    return plt.subplots(1, 2, figsize=(10.5, height), layout="constrained")[1]


def curve(frame: pd.DataFrame, axes: Sequence[Axes] | None = None) -> tuple[Axes, Axes]:
    """The curve over ω: tokens a second on the left, on the right relative to the prediction.

    Parameters
    ----------
    frame : DataFrame
        The ``curve`` of predicted.json.
    axes : sequence of matplotlib.axes.Axes, length 2, optional
        Where to draw; a new figure by default.

    Returns
    -------
    tuple of matplotlib.axes.Axes
    """
    left, right = _two(axes, 4.2)
    rate, slowest = frame["measured_tokens_per_s"], frame["measured_low"]
    mg.plot.bands(frame, measured=frame.assign(tokens_per_s=rate, low=slowest, high=rate), ax=left)
    told, at = frame["tokens_per_s"], frame["omega"]
    low, high, quick, slow = (
        100 * (x / told - 1) for x in (frame["low"], frame["high"], rate, slowest)
    )
    right.fill_between(
        at, low, high, color=_BAND, alpha=0.18, lw=0, label="predicted to lie within"
    )
    right.axhline(0, color=_BAND, lw=1.5, label="predicted")
    look = {"fmt": "D", "ms": 6, "mfc": "white", "mec": "black", "ecolor": "black", "lw": 1.2}
    right.errorbar(
        at, quick, yerr=[quick - slow, 0 * quick], label="measured, to the slowest run", **look
    )
    right.set_xlabel("ω, share of decode attention on the CPU")
    right.set_ylabel("throughput against the predicted one, %")
    right.grid(linewidth=0.4, alpha=0.4)
    right.spines[["top", "right"]].set_visible(False)
    right.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8.5, frameon=False)
    return left, right


def slopes(found: Data, axes: Sequence[Axes] | None = None) -> list[Axes]:
    """What delays do to a step, one situation below the other.

    Parameters
    ----------
    found : dict
        Of slopes.json, with at least one situation.
    axes : sequence of matplotlib.axes.Axes, optional
        Where to draw, one for each; a new figure by default.

    Returns
    -------
    list of matplotlib.axes.Axes
    """
    import matplotlib.pyplot as plt

    frames = {s["name"]: pd.DataFrame(s["slopes"]) for s in found["situations"]}
    if axes is None:
        heights = [1.0 + 0.26 * len(frame) for frame in frames.values()]
        _, grid = plt.subplots(
            len(frames),
            figsize=(8.5, sum(heights)),
            height_ratios=heights,
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        axes = list(grid[:, 0])
    for ax, (name, frame) in zip(axes, frames.items(), strict=True):
        mg.plot.causal(frame, ax)
        ax.set_title(name, loc="right", fontsize=10)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    return list(axes)


def _bands(left: Axes, right: Axes, points: Sequence[Data]) -> None:
    times = [1e3 * s for p in points for s in (p["predicted_s"], *p["runs_s"])]
    ends = [min(times) / 1.1, max(times) * 1.1]
    for limit, alpha in _LIMITS:
        low, high = ([end * factor for end in ends] for factor in (1 - limit, 1 + limit))
        left.fill_between(ends, low, high, color=_LINE, alpha=alpha, lw=0)
        right.axhspan(-100 * limit, 100 * limit, color=_LINE, alpha=alpha, lw=0)
    left.plot(ends, ends, color=_LINE, lw=0.8)
    right.axhline(0, color=_LINE, lw=0.8)
    for ax in (left, right):
        ax.set_xlim(*ends)
    left.set_ylim(*ends)


def _plain(axis: Axis) -> None:
    """Milliseconds as 200, 300, 500; not as powers of ten."""
    low, high = axis.get_view_interval()
    ticks = [m * 10**e for e in range(-1, 6) for m in (1, 1.5, 2, 3, 5, 7)]
    axis.set_ticks([t for t in ticks if low <= t <= high])
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())
