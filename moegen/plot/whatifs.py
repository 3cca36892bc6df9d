"""What changes to a measured run would bring: a bar each."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from moegen.errors import InvalidInput
from moegen.plot.frames import check
from moegen.plot.style import bare
from moegen.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Of a question in a line: longer ones would leave no room for bars.
_LETTERS = 36
_FASTER, _SLOWER = "#1b7f5c", "#c0392b"


def what_ifs(df: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """By how much each change makes a measured run faster, the best on top.

    Bars of changes that do not fit memory are pale, and say so. Where the run as simulated is not
    what was measured, the title names both, and it says where answers are not to be trusted.

    Parameters
    ----------
    df : DataFrame
        What :func:`moegen.what_ifs` gave. Questions without an answer are left out.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If the frame lacks a column, or no question has an answer.
    """
    import matplotlib.pyplot as plt

    check(df, "df", (), ("question",))
    if "error" in df.columns:
        df = df.loc[df["error"] == ""]
        if df.empty:
            raise InvalidInput("no question has an answer: the column error says why")
    check(df, "df", ("gain", "base_s", "period_s"), ())
    df = df.sort_values("gain", ascending=False, kind="stable")
    gains = [round(100 * gain, 1) + 0.0 for gain in df["gain"]]  # no -0.0
    questions = [fill(question, _LETTERS) for question in df["question"]]
    if ax is None:
        lines = 1 + max(question.count("\n") for question in questions)
        height = max(0.36, 0.06 + 0.17 * lines)
        _, ax = plt.subplots(figsize=(7.5, 1.1 + height * len(df)), layout="constrained")
    at = range(len(df))
    misfits = list(df["misfit"]) if "misfit" in df.columns else [""] * len(df)
    bars = ax.barh(at, gains, color=[_FASTER if g >= 0 else _SLOWER for g in gains], height=0.72)
    for bar, misfit in zip(bars, misfits, strict=True):
        bar.set_alpha(0.35 if misfit else 1.0)
    ax.axvline(0, color="#333333", lw=0.8)
    ax.set_yticks(at, questions)
    for y, (gain, period_s, misfit) in enumerate(zip(gains, df["period_s"], misfits, strict=True)):
        ax.annotate(
            f"{gain:+.1f}%, {format_seconds(period_s)}" + (", does not fit" if misfit else ""),
            (max(gain, 0.0), y),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    span = max(max(gains), 0.0) - min(min(gains), 0.0) or 1.0
    ax.set_xlim(min(min(gains), 0.0) - 0.03 * span, max(max(gains), 0.0) + 0.35 * span)
    ax.set_xlabel("tokens a second more, %")
    base = format_seconds(float(df["base_s"].iloc[0]))
    title = f"What changes would do to a step of {base}"
    if "measured_s" in df.columns:
        measured = format_seconds(float(df["measured_s"].iloc[0]))
        title += f", measured {measured}" if measured != base else ""
    if "doubt" in df.columns and df["doubt"].iloc[0]:
        title += ": not to be trusted"
    ax.set_title(title, loc="left", fontsize=10)
    ax.invert_yaxis()
    ax.grid(axis="x", linewidth=0.4, alpha=0.5)
    ax.tick_params(axis="y", length=0)
    bare(ax, "top", "right", "left")
    return ax
