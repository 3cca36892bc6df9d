"""Throughput over one knob, with the regimes in which one part of the machine binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.parts import PARTS
from moegen.plot.frames import check, dress, symbol, value_name, without_errors
from moegen.plot.style import FAINT, bare, letters

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Of the parts of a bound: those of the ops that a part is busy with in a Gantt chart.
_BINDS = {
    "lane BULK": "#f6d155",
    "lane KV": "#41ab5d",
    "lane ACT": "#9e9ac8",
    "lane GPU": "#f16913",
    "lane CPU": "#08519c",
    "resource h2d": "#d9b300",
    "resource d2h": "#74a33f",
    "resource zero_copy": "#238b45",
    "resource host_memory": "#8c6bb1",
    "resource gpu": "#f16913",
    "resource cpu": "#08519c",
    "chain": "#c51b8a",
}
_UNFIT = "does not fit"
_OTHER_BINDS = ("#17becf", "#bcbd22", "#e377c2")
_LINES = ("#1f3b57", "#c0392b", "#1b7f5c", "#8e44ad", "#b9770e", "#2e86c1", "#566573")
_BEST = "#c0392b"
_MARKERS = "osv^Dp*hX"


def throughput(
    df: pd.DataFrame,
    x: str = "omega",
    y: str = "decode_tokens_per_s",
    hue: str | None = None,
    ax: Axes | None = None,
    measured: pd.DataFrame | None = None,
) -> Axes:
    """A curve of predictions with its best point, and what was measured beside it.

    Where ``df`` has a column ``binds`` (see `moegen.sim.bounds.Bound.binds`) the background of
    a single curve is coloured by what binds and says so; several curves have a marker for each,
    and a star each at its own best point.

    Points that do not fit (see ``error`` in :func:`moegen.sweep`) are crosses at the bottom.

    Parameters
    ----------
    df : DataFrame
        A point a row.
    x, y : str
        Its columns for the axes, numbers. The best is the highest, of a time the lowest.
    hue : str, optional
        A column: one curve for each of its values.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    measured : DataFrame, optional
        Measured points, in the same columns.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If a frame is empty, lacks a column, or has a value that is not a finite number.
    """
    import matplotlib.pyplot as plt
    from pandas.api.types import is_numeric_dtype

    everything, df = df, without_errors(df)
    if y.startswith("prefill_") and "prefill_binds" in df:
        df = df.assign(binds=df["prefill_binds"])
    check(df, "df", (x, y), [hue] if hue is not None else [])
    if measured is not None:
        check(measured, "measured", (x, y), [])
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    df = df.sort_values(x, kind="stable")
    _set_limits(ax, [df] if measured is None else [df, measured], x, y)
    unfit = everything.loc[~everything.index.isin(df.index)]
    regimes = "binds" in df.columns
    if len(unfit):
        _mark_unfit(ax, unfit[x].tolist(), _unfit_label(unfit, hue))
    if regimes and hue is None:
        regions = [*zip(df[x], df["binds"], strict=True), *((at, _UNFIT) for at in unfit[x])]
        _shade(ax, regions, dict(zip(df[x], df[y], strict=True)))
    curves = [("predicted", df)]
    if hue is not None:
        several = df.groupby(hue, sort=is_numeric_dtype(df[hue]))  # names as they come
        curves = [(f"{symbol(hue)} = {value_name(hue, value)}", part) for value, part in several]
    for i, (label, curve) in enumerate(curves):
        marker = "" if regimes and hue is not None else "o"
        colour = _LINES[i % len(_LINES)]
        ax.plot(curve[x], curve[y], color=colour, marker=marker, ms=4, lw=2, label=label)
        if regimes and hue is not None:
            _mark(ax, curve, x, y, colour, _binding(df))
    if regimes and hue is not None:
        for marker, name in _binding(df).items():
            ax.plot([], [], marker, color="#555555", label=f"bound by {name}")
    if measured is not None:
        points = measured.sort_values(x, kind="stable")
        ax.plot(
            points[x], points[y], "D", mfc="white", mec="black", mew=1.6, ms=8, label="measured"
        )
    best = _best(df, y)
    named, colour = [best], _BEST
    for i, (_, curve) in enumerate(curves if len(curves) > 1 else ()):
        own = _best(curve, y)
        if own.equals(best):
            colour = _LINES[i % len(_LINES)]
        else:
            _point_out(ax, own, x, y, "", _LINES[i % len(_LINES)], 12, named)
            named.append(own)
    _point_out(ax, best, x, y, "best: " if measured is None else "best predicted: ", colour)
    dress(ax.xaxis, x)
    dress(ax.yaxis, y)
    ax.grid(axis="y", linewidth=0.4, alpha=0.5)
    bare(ax, "top", "right")
    if measured is not None or hue is not None:
        ax.legend(loc="lower center", fontsize=9, framealpha=0.9, edgecolor="none")
    return ax


def _set_limits(ax: Axes, frames: Sequence[pd.DataFrame], x: str, y: str) -> None:
    xs = np.concatenate([frame[x] for frame in frames])
    margin = 0.03 * float(np.ptp(xs)) or 0.5
    ax.set_xlim(float(xs.min()) - margin, float(xs.max()) + margin)
    # From 0, or small differences look large; room above for names.
    ax.set_ylim(0, 1.25 * max(float(np.max(frame[y])) for frame in frames) or 1.0)


def _unfit_label(unfit: pd.DataFrame, hue: str | None) -> str:
    if hue is None:
        return _UNFIT
    values = dict.fromkeys(value_name(hue, value) for value in unfit[hue])
    return f"{_UNFIT}: {symbol(hue)} = {', '.join(values)}"


def _mark_unfit(ax: Axes, xs: Sequence[float], label: str) -> None:
    left, right = ax.get_xlim()
    margin = 0.03 * (right - left)
    ax.set_xlim(min(left, min(xs) - margin), max(right, max(xs) + margin))
    ax.plot(xs, [0.0] * len(xs), "x", color="#a93226", ms=7, mew=2, clip_on=False, label=label)


def _name(binds: str) -> str:
    return PARTS[binds].short if binds in PARTS else str(binds)


def _binding(df: pd.DataFrame) -> dict[str, str]:
    """A marker for every part that binds somewhere, and the part's name."""
    names = list(dict.fromkeys(map(_name, df["binds"])))
    return dict(zip(_MARKERS, names, strict=False))


def _shade(ax: Axes, points: Sequence[tuple[float, str]], height: Mapping[float, float]) -> None:
    """Colour the background by what binds, from halfway between one point and the next.

    ``height`` is where the curve is at each x: a name on its side stands where the curve is not.
    """
    points = sorted(points, key=lambda point: point[0])
    xs, names = [at for at, _ in points], [_name(binds) for _, binds in points]
    colours = {_name(binds): _BINDS[binds] for _, binds in points if binds in _BINDS}
    others = iter(_OTHER_BINDS)
    left, right = ax.get_xlim()
    edges = [left, *((a + b) / 2 for a, b in pairwise(xs)), right]
    for name, group in groupby(range(len(xs)), key=names.__getitem__):
        first, *_, last = [*group] * 2
        begin, end = edges[first], edges[last + 1]
        if name not in colours:
            colours[name] = "#777777" if name == _UNFIT else next(others, FAINT)
        ax.axvspan(begin, end, color=colours[name], alpha=0.16, lw=0, zorder=0)
        text = name if name == _UNFIT else f"{name} binds"
        fits = len(text) < (end - begin) / (right - left) * letters(ax)
        highest = max((height.get(at, 0.0) for at in xs[first : last + 1]), default=0.0)
        on_top = fits or highest < 0.5 * ax.get_ylim()[1]
        ax.text(
            (begin + end) / 2,
            0.985 if on_top else 0.02,
            text,
            transform=ax.get_xaxis_transform(),
            ha="center",
            va="top" if on_top else "bottom",
            fontsize=8,
            color="#333333",
            rotation=0 if fits else 90,
        )


def _mark(
    ax: Axes, curve: pd.DataFrame, x: str, y: str, colour: str, binding: dict[str, str]
) -> None:
    for marker, name in binding.items():
        own = curve[[_name(b) == name for b in curve["binds"]]]
        ax.plot(own[x], own[y], marker, color=colour, ms=6)


def _lowest(y: str) -> bool:
    return y.endswith("_s") and not y.endswith("_per_s")


def _best(df: pd.DataFrame, y: str) -> Any:
    """The row of the highest, of a time the lowest."""
    ys = np.asarray(df[y], dtype=float)
    return df.iloc[int(ys.argmin() if _lowest(y) else ys.argmax())]


def _point_out(
    ax: Axes,
    row: Any,
    x: str,
    y: str,
    what: str,
    colour: str = _BEST,
    size: float = 17,
    named: Sequence[Any] = (),
) -> None:
    """A star at a row's point and its numbers above, unless they would touch those ``named``."""
    at, value = float(row[x]), float(row[y])
    of_tokens = y.endswith("tokens_per_s") or y == "throughput"
    unit = " tokens/s" if of_tokens else " s" if _lowest(y) else ""
    left, right = ax.get_xlim()
    share, top = (at - left) / (right - left), ax.get_ylim()[1]
    ax.plot(at, value, "*", color=colour, mec="white", mew=0.8, ms=size, zorder=4)
    near = (abs(at - o[x]) < 0.3 * (right - left) for o in named if abs(value - o[y]) < 0.1 * top)
    if any(near):
        return
    numbers = f"{_short(value)}{unit} at {symbol(x)} = {value_name(x, at)}"
    ax.annotate(
        what + numbers if what else f"{_short(value)} at {value_name(x, at)}",
        (at, value),
        (0, 9),
        textcoords="offset points",
        ha="left" if share < 0.2 else "right" if share > 0.8 else "center",
        va="bottom",
        fontsize=9 if what else 8,
        color="#a93226" if colour == _BEST else colour,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
        zorder=5,
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
