"""What would make a repeated step shorter: bars of sensitivities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moegen.errors import InvalidInput
from moegen.plot.style import LANE_COLOURS, bare, op_colours
from moegen.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moegen.sim.steady import Steady

_SLOT_COLOUR = "#7f8c8d"
# Ops and lanes below this share of a step are next to nothing, and are drawn as one.
_LEAST = 2e-3


def sensitivities(steady: Steady, ax: Axes | None = None, *, by: str = "op") -> Axes:
    """By how much a step shortens when some of its tasks take less time, or get one more slot.

    Parameters
    ----------
    steady : Steady
        What :func:`moegen.steady` gave: nobody shares anything with anybody.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    by : {"op", "lane", "slot"}
        Whose tasks take less time; "slot": which buffer gets one slot more.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If ``by`` is none of these.
    """
    import matplotlib.pyplot as plt

    if by not in ("op", "lane", "slot"):
        raise InvalidInput(f'by must be "op", "lane" or "slot", got {by!r}')
    names, values, notes, colours = _slots(steady) if by == "slot" else _tasks(steady, by)
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 1.1 + 0.34 * len(names)), layout="constrained")
    ax.barh(names, values, color=colours, height=0.72)
    for y, (value, note) in enumerate(zip(values, notes, strict=True)):
        ax.annotate(note, (value, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    ax.set_xlim(0, 1.45 * max(values, default=0.0) or 1.0)
    gain = "With one more slot" if by == "slot" else f"If all tasks of one {by} took 1% less time"
    unit = "ms" if by == "slot" else "%"
    ax.set_xlabel(f"a step of {format_seconds(steady.period_s)} is shorter by so many {unit}")
    ax.set_title(gain, loc="left", fontsize=10)
    ax.invert_yaxis()
    ax.grid(axis="x", linewidth=0.4, alpha=0.5)
    ax.tick_params(axis="y", length=0)
    bare(ax, "top", "right", "left")
    return ax


def _tasks(steady: Steady, by: str) -> tuple[list[str], list[float], list[str], list[str]]:
    frame: Any = steady.by_op if by == "op" else steady.by_lane
    lanes = {lane.value: colour for lane, colour in LANE_COLOURS.items()}
    colours = op_colours(list(frame.index)) if by == "op" else lanes
    shown = frame[frame["share"] >= _LEAST]
    rest = [name for name in frame.index if name not in shown.index]
    names, values = list(shown.index), shown["share"].tolist()
    notes = [
        f"{share:.2g}% (takes {seconds} a step)"
        for share, seconds in zip(values, map(format_seconds, shown["seconds"]), strict=True)
    ]
    if rest:
        names.append("all others" if shown.index.size else "each of them")
        values.append(0.0)
        notes.append("next to nothing: " + _listed(rest))
    return names, values, notes, [*(colours[name] for name in shown.index), _SLOT_COLOUR]


def _slots(steady: Steady) -> tuple[list[str], list[float], list[str], list[str]]:
    frame: Any = steady.by_slot
    names, values, notes = [], [], []
    for name, row in frame[frame["gain_s"] > 0].iterrows():
        names.append(f"{name}, {row['slots']} so far")
        values.append(1e3 * row["gain_s"])
        notes.append(f"{format_seconds(row['gain_s'])} for {format_bytes(row['bytes'])}")
    rest = [str(name) for name in frame.index if not frame.loc[name, "gain_s"] > 0]
    if rest:
        names.append("all others" if names else "each of them")
        values.append(0.0)
        notes.append("nothing: " + _listed(rest))
    return names, values, notes, [_SLOT_COLOUR] * len(names)


def _listed(names: list[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
