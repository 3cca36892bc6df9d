"""What a throughput costs: points of price or power, and the frontier that nothing beats."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.plot.frames import check, dress, symbol, without_errors
from moegen.plot.style import bare

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_FRONT, _BEATEN = "#1f3b57", "#b3bcc4"
_COSTS = {"price_usd": "price", "power_w": "power", "time_s": "time"}
# Where a name may stand beside its point, in points: the first place that is free. The frontier
# comes from below and goes on to the right.
_PLACES = (
    (-6, 3, "right", "bottom"), (6, -4, "left", "top"), (6, 4, "left", "bottom"),
    (-6, -4, "right", "top"), (0, 9, "center", "bottom"), (0, -9, "center", "top"),
    (6, 16, "left", "bottom"), (6, -16, "left", "top"),
)  # fmt: skip
# Farther away, with a line to the point.
_FAR = tuple(
    (dx, dy, "left" if dx > 0 else "right", "center")
    for r in (24, 40, 60, 85, 115)
    for dx, dy in ((r, -0.5 * r), (r, 0.5 * r), (r, 0), (-r, 0.5 * r), (0.3 * r, r), (-0.3 * r, r))
)


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

    The line is the most that can be had at a price or below; points that it passes by are grey.
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
    from matplotlib.ticker import LogLocator, NullLocator

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
    if not on_front.all():
        ax.plot(xs[~on_front], ys[~on_front], "o", color=_BEATEN, ms=7, label="beaten by another")
    ax.step(
        [*front[x], 2 * float(xs.max())],
        [*front[y], front[y].iloc[-1]],
        "-",
        where="post",
        color=_FRONT,
        lw=1.5,
        alpha=0.6,
        zorder=1,
    )
    best = f"best at its {_COSTS.get(x, symbol(x))} or below"
    ax.plot(front[x], front[y], "o", color=_FRONT, ms=8, label=best)
    if xs.min() > 0 and xs.max() > 10 * xs.min():  # or the cheap ones lie on each other
        ax.set_xscale("log")
        ax.set_xlim(0.7 * float(xs.min()), 1.5 * float(xs.max()))
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_minor_locator(NullLocator())
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
    _name_points(ax, xs, ys, names, on_front)  # where all else has its place
    return ax


def _name_points(ax: Axes, xs: Any, ys: Any, names: list[str], on_front: Any) -> None:
    """Each name where it hides no point, no other name and no line, those on the frontier first."""
    figure: Any = ax.figure
    figure.draw_without_rendering()  # or nothing has its place yet
    points = ax.transData.transform(np.column_stack([xs, ys]))
    stairs = _stairs(points[on_front], ax.get_window_extent().x1)
    axes, taken = ax.get_window_extent(), list[Any]()

    def hidden(box: Any, i: int) -> float:
        """What a name of point ``i`` in ``box`` would be in the way of."""
        outside = not (axes.x0 <= box.x0 and box.x1 <= axes.x1 and axes.y0 <= box.y0)
        on_points = sum(box.contains(*p) for j, p in enumerate(points) if j != i)
        on_names = sum(box.overlaps(other) for other in taken)
        on_line = any(map(box.overlaps, stairs))
        astray = _gaps(points, box).argmin() != i
        return 20 * outside + 10 * on_names + 4 * on_points + 2 * astray + on_line

    for i in np.argsort(~on_front, kind="stable"):
        style: dict[str, Any] = {
            "textcoords": "offset points",
            "fontsize": 8.5 if on_front[i] else 7.5,
            "color": _FRONT if on_front[i] else "#777777",
        }
        at = (xs[i], ys[i])
        near = _PLACES if on_front[i] else (*_PLACES[1:], _PLACES[0])
        tried = list[tuple[float, int]]()
        for dx, dy, ha, va in (*near, *_FAR):
            text = ax.annotate(names[i], at, (dx, dy), ha=ha, va=va, **style)
            tried.append((hidden(text.get_window_extent().padded(1.5), i), len(tried)))
            text.remove()
            if not tried[-1][0]:
                break
        place = min(tried)[1]
        dx, dy, ha, va = (*near, *_FAR)[place]
        if place >= len(near):
            end = (0.0 if ha == "left" else 1.0, 0.5)
            line = {"arrowstyle": "-", "lw": 0.7, "color": "#777777", "relpos": end}
            style["arrowprops"] = line | {"shrinkA": 0, "shrinkB": 4}
        text = ax.annotate(names[i], at, (dx, dy), ha=ha, va=va, **style)
        taken.append(text.get_window_extent() if place < len(near) else _of_words(text))


def _gaps(points: Any, box: Any) -> Any:
    """How far each point is from a box."""
    x, y = points.T
    beside = np.maximum.reduce([box.x0 - x, x - box.x1, 0 * x])
    return np.hypot(beside, np.maximum.reduce([box.y0 - y, y - box.y1, 0 * y]))


def _of_words(text: Any) -> Any:
    """The place of an annotation's words, without the line to its point."""
    from matplotlib.text import Text

    return Text.get_window_extent(text)


def _stairs(front: Any, right: float) -> list[Any]:
    """The frontier's straight pieces, as boxes on the screen."""
    from matplotlib.transforms import Bbox

    front = front[np.argsort(front[:, 0])]
    pieces = list[Any]()
    for (x0, y0), (x1, y1) in pairwise([*front, (right, front[-1, 1])]):
        pieces += [Bbox([[x0, y0 - 1], [x1, y0 + 1]]), Bbox([[x1 - 1, y0], [x1 + 1, y1]])]
    return pieces
