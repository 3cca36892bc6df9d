"""Throughput over one knob, with the regimes in which one part of the machine binds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.parts import PARTS
from moegen.plot.style import FAINT, bare, letters

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_AXES = {
    "omega": "ω, share of decode attention on the CPU",
    "B": "B, sequences in flight together",
    "b_a": "b_a, sequences that the GPU attends to at a time",
    "b_e": "b_e, tokens through an expert at a time",
    "h2d_bytes_per_s": "link, host to GPU (bytes/s)",
    "host_memory_bytes": "host memory (bytes)",
    "gpu_memory_bytes": "GPU memory (bytes)",
    "kv_len": "tokens of context",
    "decode_tokens_per_s": "decode throughput (tokens/s)",
    "prefill_tokens_per_s": "prefill throughput (tokens/s)",
    "tokens_per_s": "throughput (tokens/s)",
    "time_s": "time (s)",
}
_SYMBOLS = {"omega": "ω"}
# Of the parts of a bound: those of the ops that a part is busy with in a Gantt chart.
_BINDS = {
    "lane BULK": "#f6d155",
    "lane KV": "#41ab5d",
    "lane ACT": "#9e9ac8",
    "lane GPU": "#f16913",
    "lane CPU": "#08519c",
    "resource h2d": "#d9b300",
    "resource d2h": "#74a33f",
    "resource host_memory": "#8c6bb1",
    "resource gpu": "#f16913",
    "resource cpu": "#08519c",
    "chain": "#c51b8a",
}
_OTHER_BINDS = ("#17becf", "#bcbd22", "#e377c2")
_LINES = ("#1f3b57", "#c0392b", "#1b7f5c", "#8e44ad", "#b9770e", "#2e86c1", "#566573")
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
    a single curve is coloured by what binds and says so; several curves have a marker for each.

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

    _check(df, "df", (x, y), [hue] if hue is not None else [])
    if measured is not None:
        _check(measured, "measured", (x, y), [])
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    df = df.sort_values(x, kind="stable")
    _set_limits(ax, [df] if measured is None else [df, measured], x, y)
    regimes = "binds" in df.columns
    if regimes and hue is None:
        _shade(ax, df, x)
    curves = [("predicted", df)]
    if hue is not None:
        curves = [(f"{_SYMBOLS.get(hue, hue)} = {v}", c) for v, c in df.groupby(hue, sort=True)]
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
    _point_out_best(ax, df, x, y, "best" if measured is None else "best predicted")
    ax.set_xlabel(_AXES.get(x, x))
    ax.set_ylabel(_AXES.get(y, y))
    ax.grid(axis="y", linewidth=0.4, alpha=0.5)
    bare(ax, "top", "right")
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(loc="lower center", fontsize=9, framealpha=0.9, edgecolor="none")
    return ax


def _check(frame: Any, name: str, numbers: Sequence[str], others: Sequence[str]) -> None:
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise InvalidInput(f"{name} must be a DataFrame, got {type(frame).__name__}")
    for column in (*numbers, *others):
        if column not in frame.columns:
            there = ", ".join(map(str, frame.columns)) or "none"
            raise InvalidInput(f"{name} has no column {column!r}; its columns are {there}")
    if frame.empty:
        raise InvalidInput(f"{name} has no rows: there is nothing to plot")
    for column in (*others, *({"binds"} & set(frame.columns))):
        for row in np.flatnonzero(frame[column].isna())[:1]:
            raise InvalidInput(f"{name}[{column!r}] has no value in row {frame.index[row]}")
    for column in numbers:
        values = np.asarray(frame[column])
        if values.dtype.kind not in "iuf":
            raise InvalidInput(f"{name}[{column!r}] must hold numbers, got {values.tolist()[:3]}")
        for row in np.flatnonzero(~np.isfinite(values))[:1]:
            raise InvalidInput(
                f"{name}[{column!r}] is {values[row]} in row {frame.index[row]}: leave out points "
                f"that have no value"
            )


def _set_limits(ax: Axes, frames: Sequence[pd.DataFrame], x: str, y: str) -> None:
    xs = np.concatenate([frame[x] for frame in frames])
    margin = 0.03 * float(np.ptp(xs)) or 0.5
    ax.set_xlim(float(xs.min()) - margin, float(xs.max()) + margin)
    # From 0, or small differences look large; room above for names.
    ax.set_ylim(0, 1.25 * max(float(np.max(frame[y])) for frame in frames) or 1.0)


def _name(binds: str) -> str:
    return PARTS[binds].short if binds in PARTS else str(binds)


def _binding(df: pd.DataFrame) -> dict[str, str]:
    """A marker for every part that binds somewhere, and the part's name."""
    names = list(dict.fromkeys(map(_name, df["binds"])))
    return dict(zip(_MARKERS, names, strict=False))


def _shade(ax: Axes, df: pd.DataFrame, x: str) -> None:
    """Colour the background by what binds, from halfway between one point and the next."""
    xs, names = df[x].tolist(), [_name(b) for b in df["binds"]]
    colours = {_name(b): _BINDS[b] for b in df["binds"] if b in _BINDS}
    others = iter(_OTHER_BINDS)
    left, right = ax.get_xlim()
    edges = [left, *((a + b) / 2 for a, b in pairwise(xs)), right]
    for name, group in groupby(range(len(xs)), key=names.__getitem__):
        first, *_, last = [*group] * 2
        begin, end = edges[first], edges[last + 1]
        if name not in colours:
            colours[name] = next(others, FAINT)
        ax.axvspan(begin, end, color=colours[name], alpha=0.16, lw=0, zorder=0)
        text = f"{name} binds"
        fits = len(text) < (end - begin) / (right - left) * letters(ax)
        ax.text(
            (begin + end) / 2,
            0.985 if fits else 0.02,
            text,
            transform=ax.get_xaxis_transform(),
            ha="center",
            va="top" if fits else "bottom",
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


def _point_out_best(ax: Axes, df: pd.DataFrame, x: str, y: str, what: str) -> None:
    lowest = y.endswith("_s") and not y.endswith("_per_s")
    xs, ys = np.asarray(df[x], dtype=float), np.asarray(df[y], dtype=float)
    best = int(ys.argmin() if lowest else ys.argmax())
    at, value = float(xs[best]), float(ys[best])
    unit = " tokens/s" if y.endswith("tokens_per_s") else " s" if lowest else ""
    left, right = ax.get_xlim()
    share = (at - left) / (right - left)
    ax.plot(at, value, "*", color="#c0392b", mec="white", mew=0.8, ms=17, zorder=4)
    ax.annotate(
        f"{what}: {_short(value)}{unit} at {_SYMBOLS.get(x, x)} = {at:g}",
        (at, value),
        (0, 9),
        textcoords="offset points",
        ha="left" if share < 0.2 else "right" if share > 0.8 else "center",
        va="bottom",
        fontsize=9,
        color="#a93226",
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
