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
from moegen.sim.uncertainty import LEVEL

COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")
_LIMITS = ((judge.WORST, 0.10), (judge.MEDIAN, 0.16))
_LINE, _BAND, _MEASURED = "#333333", "#1f3b57", "#b30000"


def predicted_and_measured(
    points: Sequence[Data], axes: Sequence[Axes] | None = None
) -> tuple[Axes, Axes]:
    """On the left predicted over measured, both logarithmic; on the right the error.

    Bands are of 3% and 6%. A bar goes from the quickest run of a point, where the mark is, to its
    slowest. Filled marks are points drawn at random, empty ones the curve's and the planner's, as
    the legend says.

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
    for face, what in ((_LINE, "drawn at random"), ("white", "curve over ω, planner's choice")):
        word = "filled" if face == _LINE else "empty"
        left.plot([], [], "o", mfc=face, mec=_LINE, label=f"{word}: {what}")
    _bands(left, right, points)
    left.set_ylabel("predicted, ms a step")
    left.legend(loc="upper left", fontsize=8.5, frameon=False)
    right.set_ylabel("error, %: above 0 predicted too slow, below 0 too fast")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_xlabel("measured, ms a step")
        ax.grid(which="both", linewidth=0.4, alpha=0.4)
        ax.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        _plain(axis)
    left.set_title("The time of a step; shaded: within 3% and 6%", loc="left", fontsize=10)
    right.set_title("Its error; bars go to the slowest run", loc="left", fontsize=10)
    return left, right


def _two(axes: Sequence[Axes] | None, height: float) -> Sequence[Axes]:
    """The axes given, or two side by side in a new figure, so many inches high."""
    import matplotlib.pyplot as plt

    if axes is not None:
        return axes
    return plt.subplots(1, 2, figsize=(10.5, height), layout="constrained")[1]


def curve(
    frame: pd.DataFrame, axes: Sequence[Axes] | None = None, *, miss: float = 0.0
) -> tuple[Axes, Axes]:
    """The curve over ω: tokens a second on the left, on the right relative to the prediction.

    Parameters
    ----------
    frame : DataFrame
        The ``curve`` of predicted.json.
    axes : sequence of matplotlib.axes.Axes, length 2, optional
        Where to draw; a new figure by default.
    miss : float
        As of `judge.usual_miss`: a second band is that much wider; none for 0.

    Returns
    -------
    tuple of matplotlib.axes.Axes
    """
    left, right = _two(axes, 4.4)
    told, at = frame["tokens_per_s"], frame["omega"]
    sides = ["tokens_per_s", "low", "high", "measured_tokens_per_s", "measured_low"]
    points = frame.to_dict("records")
    wide = [judge.band(row, miss) for row in points]
    rates = frame[sides].assign(least=[x for x, _ in wide], most=[x for _, x in wide])
    for ax, y in ((left, rates), (right, 100 * (rates.div(told, axis=0) - 1))):
        if miss:
            beside = f"{LEVEL:.0%} with what other measurements missed"
            ax.fill_between(at, y["least"], y["most"], color=_BAND, alpha=0.13, lw=0, label=beside)
        band = f"{LEVEL:.0%} by the profile's own scatter" if miss else f"{LEVEL:.0%} band"
        ax.fill_between(at, y["low"], y["high"], color=_BAND, alpha=0.3, lw=0, label=band)
        ax.plot(at, y["tokens_per_s"], color=_BAND, lw=1.2, label="predicted")
        quick = y["measured_tokens_per_s"]
        late = [quick - y["measured_low"], 0 * quick]
        look = {"fmt": "o", "ms": 4, "color": _MEASURED, "elinewidth": 1.2}
        ax.errorbar(at, quick, yerr=late, label="measured; bar: to the slowest run", **look)
        ax.set_xlabel("ω, share of decode attention on the CPU")
        ax.grid(linewidth=0.4, alpha=0.4)
        ax.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("throughput, tokens/s")
    left.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    left.set_title("Throughput; the axis does not start at 0", loc="left", fontsize=10)
    left.legend(loc="upper left", fontsize=8.5, frameon=False)
    right.set_ylabel("measured less predicted, % of predicted")
    c = judge.Coverage.of(points)
    words = f"As error: {c.inside} of {c.n} in the band, {c.expected} expected"
    if miss:
        words += f"; {judge.Coverage.of(points, miss).inside} in the wide one"
    right.set_title(words, loc="left", fontsize=10)
    return left, right


def slopes(found: Data, axes: Sequence[Axes] | None = None) -> list[Axes]:
    """What delays do to a step, one situation below the other.

    Ops whose measured slope does not agree with the predicted one in sign say so.

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

    frames = [(judge.title(s), pd.DataFrame(s["slopes"])) for s in found["situations"]]
    if axes is None:
        heights = [1.0 + 0.26 * len(frame) for _, frame in frames]
        _, grid = plt.subplots(
            len(frames),
            figsize=(8.5, sum(heights)),
            height_ratios=heights,
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        axes = list(grid[:, 0])
    for ax, (title, frame) in zip(axes, frames, strict=True):
        mg.plot.causal(frame, ax)
        # Between the first title and its axes is the legend of all.
        pad = 22 if ax is axes[0] else 6
        ax.set_title(title[0].upper() + title[1:], loc="left", fontsize=10, pad=pad)
        _name_disagreement(ax, frame)
    for ax in axes[1:]:
        if (legend := ax.get_legend()) is not None:
            legend.remove()
    for ax in axes[:-1]:
        ax.set_xlabel("")
    axes[-1].set_xlabel(
        "1: every second of delay makes the step a second longer.   0: the delay does not show."
    )
    return list(axes)


def _name_disagreement(ax: Axes, frame: pd.DataFrame) -> None:
    """Beside each op whose measured slope has another sign than the predicted one."""
    rows = [label.get_text().split(" ")[0] for label in ax.get_yticklabels()]
    for op, tasks, slope, se in frame.loc[
        ~frame["agrees"].astype(bool), ["op", "tasks", "measured_slope", "se"]
    ].itertuples(index=False):
        end = (slope + judge.SURE * se) / tasks
        words = "sign not as predicted"
        look = {"va": "center", "fontsize": 8.5, "color": _MEASURED}
        ax.annotate(words, (end, rows.index(op)), (6, 0), textcoords="offset points", **look)


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
