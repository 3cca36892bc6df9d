"""What a throughput costs: points of price or power, and the frontier that nothing beats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.plot.frames import check, dress, without_errors
from moegen.plot.style import bare

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_FRONT, _BEATEN = "#1f3b57", "#b3bcc4"
# Where a name may stand beside its point, in points: the first place that is free. The frontier
# comes from below and goes on to the right.
_PLACES = (
    (-6, 3, "right", "bottom"), (6, -4, "left", "top"), (6, 4, "left", "bottom"),
    (-6, -4, "right", "top"), (0, 9, "center", "bottom"), (0, -9, "center", "top"),
    (6, 16, "left", "bottom"), (6, -16, "left", "top"),
)  # fmt: skip


def frontier(df: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The rows that no other row beats: none costs less and gives as much, or gives more.

    Parameters
    ----------
    df : DataFrame
    x : str
        What it costs, the less the better.
    y : str
        What it gives, the more the better.

    Returns
    -------
    DataFrame
        Some of the rows, by ``x``.
    """
    ordered = df.sort_values([x, y], ascending=[True, False], kind="stable")
    best = np.maximum.accumulate(ordered[y].to_numpy(dtype=float))
    return ordered.loc[np.diff(best, prepend=-np.inf) > 0]


def pareto(
    df: pd.DataFrame,
    x: str = "price_usd",
    y: str = "decode_tokens_per_s",
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Throughput against what it costs, each point by name, with the frontier drawn.

    The line joins the points that no other beats at their price or below; the others are grey.
    Points that do not fit (see ``error`` in :func:`moegen.sweep`) are left out.

    Parameters
    ----------
    df : DataFrame
        A point a row, as :func:`moegen.sweep` gives them.
    x : str
        The column of what it costs: ``price_usd``, ``power_w``, ``time_s``, ...
    y : str
        The column of what it gives.
    label : str, optional
        The column of names; by default ``hw``, else ``model``, else the index.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If the frame is empty, lacks a column, or has a value that is not a finite number: the
        price of a machine may be unknown.
    """
    import matplotlib.pyplot as plt

    df = without_errors(df)
    check(df, "df", (x, y), [label] if label is not None else [])
    label = label or next((name for name in ("hw", "model") if name in df.columns), None)
    names = [str(name) for name in (df.index if label is None else df[label])]
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    front = frontier(df, x, y)
    on_front = df.index.isin(front.index)
    if not df.index.is_unique:
        raise InvalidInput("df's index has an entry twice: give each row its own, reset_index()")
    xs, ys = df[x].to_numpy(dtype=float), df[y].to_numpy(dtype=float)
    ax.set_xlim(0, 1.18 * float(xs.max()))
    ax.set_ylim(0, 1.15 * float(ys.max()) or 1.0)
    ax.plot(xs[~on_front], ys[~on_front], "o", color=_BEATEN, ms=7, label="beaten by another")
    right = ax.get_xlim()[1]
    ax.step(
        [*front[x], right],
        [*front[y], front[y].iloc[-1]],
        "-",
        where="post",
        color=_FRONT,
        lw=1.5,
        alpha=0.6,
        zorder=1,
    )
    ax.plot(front[x], front[y], "o", color=_FRONT, ms=8, label="best at its price or below")
    _name_points(ax, xs, ys, names, on_front)
    dress(ax.xaxis, x)
    dress(ax.yaxis, y)
    ax.grid(linewidth=0.4, alpha=0.5)
    bare(ax, "top", "right")
    ax.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=2,
        fontsize=8.5,
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1.2,
    )
    return ax


def _name_points(ax: Axes, xs: Any, ys: Any, names: list[str], on_front: Any) -> None:
    """Each name where it hides no point and no other name, those on the frontier first."""
    figure: Any = ax.figure
    figure.draw_without_rendering()  # or nothing has its place yet
    points = ax.transData.transform(np.column_stack([xs, ys]))
    axes, taken = ax.get_window_extent(), list[Any]()
    for i in np.argsort(~on_front, kind="stable"):
        text = None
        places = _PLACES if on_front[i] else (*_PLACES[1:], _PLACES[0])
        for dx, dy, ha, va in places:
            if text is not None:
                text.remove()
            text = ax.annotate(
                names[i],
                (xs[i], ys[i]),
                (dx, dy),
                textcoords="offset points",
                ha=ha,
                va=va,
                fontsize=8.5 if on_front[i] else 7.5,
                color=_FRONT if on_front[i] else "#777777",
            )
            box = text.get_window_extent().padded(1)
            inside = axes.x0 <= box.x0 and box.x1 <= axes.x1
            clear = inside and not any(box.overlaps(other) for other in taken)
            if clear and not any(box.contains(*p) for j, p in enumerate(points) if j != i):
                break
        assert text is not None
        taken.append(text.get_window_extent())
