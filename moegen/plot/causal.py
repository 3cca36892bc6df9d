"""Slopes of a step over the delay of its tasks: predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moegen.plot.frames import check
from moegen.plot.style import bare

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes

# So far below 0 and above 1 the axis goes at most, for the noise of measured slopes.
_BEYOND = 0.5
_PREDICTED, _MEASURED = "#9ecae1", "#b30000"


def causal(df: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What part of the delay before each op's tasks a step lengthens by.

    1: every second of delay, before every task, shows in the period; 0: none does; above 1: the
    issuing thread, slower after a rest, adds to it. It is the slope
    of the frame over the tasks of a step. Where noise reaches far beyond that, the axis ends, and
    what was measured is written at its end.

    Parameters
    ----------
    df : DataFrame
        What :func:`moegen.causal` gave, or :func:`moegen.delay_slopes`, which has no
        measurement.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If the frame is empty or lacks a column.
    """
    import matplotlib.pyplot as plt

    is_measured = "measured_slope" in df.columns
    predicted = "predicted_slope" if is_measured else "slope"
    numbers = [predicted, "tasks", *(("measured_slope", "se") if is_measured else ())]
    check(df, "df", numbers, ("op", "lane"))
    df = df.assign(share=df[predicted] / df["tasks"])
    df = df.sort_values("share", ascending=False, kind="stable")
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 1.3 + 0.3 * len(df)), layout="constrained")
    at = range(len(df))
    ax.barh(at, df["share"], color=_PREDICTED, height=0.72, label="predicted")
    if is_measured:
        shares, errors = df["measured_slope"] / df["tasks"], 2 * df["se"] / df["tasks"]
        label = "measured, ± two standard errors"
        bars = {"color": _MEASURED, "elinewidth": 1.2, "capsize": 3}
        ax.errorbar(shares, at, xerr=errors, fmt="o", ms=4.5, label=label, **bars)
        _bound(ax, df["share"].to_numpy(float), shares.to_numpy(float), errors.to_numpy(float))
    for line in (0, 1):
        ax.axvline(line, color="#333333", lw=0.8, ls="-" if line == 0 else ":")
    names = zip(df["op"], df["tasks"], df["lane"], strict=True)
    ax.set_yticks(at, [f"{op} ({n} on {lane})" for op, n, lane in names])
    ax.set_xlabel("seconds that a step is longer, for each second that its tasks are held back")
    ax.invert_yaxis()
    ax.grid(axis="x", linewidth=0.4, alpha=0.5)
    ax.tick_params(axis="y", length=0)
    bare(ax, "top", "right", "left")
    ax.margins(y=0.02)
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, fontsize=9, frameon=False)
    return ax


def _bound(ax: Axes, predicted: np.ndarray, measured: np.ndarray, errors: np.ndarray) -> None:
    """End the axis where noise alone would go on, and say there what goes beyond it."""
    # The same ends for pictures that share an axis.
    low, high = min(-_BEYOND, predicted.min()), max(1 + _BEYOND, predicted.max())
    if (measured - errors >= low).all() and (measured + errors <= high).all():
        return
    margin = 0.03 * (high - low)
    ax.set_xlim(low - margin, high + margin)
    for y, (share, error) in enumerate(zip(measured, errors, strict=True)):
        if share - error < low or share + error > high:
            right = share + error > high
            ax.annotate(
                f"{share:.2f} ± {error:.2f} →" if right else f"← {share:.2f} ± {error:.2f}",
                (1 if right else 0, y),
                (0, 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right" if right else "left",
                fontsize=8,
            )
