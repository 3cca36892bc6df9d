"""A predicted curve with its uncertainty, and measured points with their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moegen.plot.frames import check
from moegen.plot.throughput import throughput

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_BAND = "#1f3b57"
# Less probable candidates are not named.
LEAST = 0.005


def bands(
    df: pd.DataFrame,
    x: str = "omega",
    y: str = "tokens_per_s",
    ax: Axes | None = None,
    measured: pd.DataFrame | None = None,
) -> Axes:
    """A predicted curve in its band, with what was measured beside it.

    Where ``df`` has a column ``probability_best``, candidates that are the best in at least one
    sample of two hundred say in how many.

    Parameters
    ----------
    df : DataFrame
        What :func:`moegen.bands` gave: a point a row, with columns ``low`` and ``high``.
    x, y : str
        Its columns for the axes, numbers.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    measured : DataFrame, optional
        Measured points, in the same columns; ``low`` and ``high``, if they are there, are the
        ends of their error bars.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If a frame is empty, lacks a column, or has a value that is not a finite number.
    """
    check(df, "df", (x, y, "low", "high"), [])
    df = df.sort_values(x, kind="stable")
    ax = throughput(df, x=x, y=y, ax=ax, measured=measured)
    label = "predicted to lie within"
    ax.fill_between(df[x], df["low"], df["high"], color=_BAND, alpha=0.18, lw=0, label=label)
    highest = float(np.max(df["high"]))
    if measured is not None and {"low", "high"} <= set(measured.columns):
        check(measured, "measured", ("low", "high"), [])
        points = measured.sort_values(x, kind="stable")
        beyond = np.maximum(0.0, [points[y] - points["low"], points["high"] - points[y]])
        bars = {"ecolor": "black", "elinewidth": 1.2, "capsize": 3}
        ax.errorbar(points[x], points[y], yerr=beyond, fmt="none", **bars)
        highest = max(highest, float(np.max(points["high"])))
    ax.set_ylim(0, max(ax.get_ylim()[1], 1.25 * highest))
    if "probability_best" in df.columns:
        likely = df.loc[df["probability_best"] >= LEAST]
        for at, low, share in likely[[x, "low", "probability_best"]].to_numpy(dtype=float):
            ax.annotate(
                f"{share:.0%}",
                (at, low),
                (0, -5),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=8,
                color=_BAND,
            )
        ax.plot([], [], " ", label="%: how probably it is the best")
    # Above the axes: within them there may be no place that neither curve nor band goes through.
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8.5, frameon=False)
    return ax
