"""Predicted against measured in one picture: why the step's time is wrong, and which ops are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moegen.errors import InvalidInput
from moegen.plot.style import bare, op_colours, time_unit
from moegen.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moegen.comparison import Comparison

_TOTAL, _TOO_SLOW, _TOO_FAST = "#4d4d4d", "#cb181d", "#2171b5"
_PREDICTED = "#bdbdbd"
# Ops that have less to do with the error than this share of the step are drawn as one, and so
# are those beyond the first few.
_LEAST = 2e-3
_MOST = 5
_LEAST_BAR, _MOST_BARS = 5e-3, 12
_WORDS = {
    "scheduling and contention": "scheduling,\ncontention",
    "untracked overhead": "untracked\noverhead",
}


class _Bar(NamedTuple):
    name: str
    seconds: float  # of the error: predicted less measured


def comparison(c: Comparison, axes: Sequence[Axes] | None = None) -> tuple[Axes, Axes]:
    """From the measured step to the predicted one, part by part; beside it every op.

    On the left a waterfall of the mean step: the parts of the error add up from the measured
    period to the predicted one, each with its sign, as in ``Comparison.parts``. Red ones were
    predicted too slow, blue ones too fast. The first are of single ops, as far as they change the
    step (``Comparison.task_cost``). Where the axis does not start at 0 its label says so, and the
    bars of both periods are broken.

    On the right what all tasks of an op take in a step, predicted and measured, and the error of
    the prediction. A star: the op is off and has no bar on the left, because the step does not
    wait for it or because it is others that slow it.

    Parameters
    ----------
    c : Comparison
        What :func:`moegen.compare` gave.
    axes : sequence of matplotlib.axes.Axes, length 2, optional
        Where to draw both; a new figure by default.

    Returns
    -------
    tuple of matplotlib.axes.Axes
        The waterfall and the ops.

    Raises
    ------
    InvalidInput
        If ``axes`` are not two, or nothing takes any time.
    """
    import matplotlib.pyplot as plt

    if not max(c.predicted_period_s, c.measured_period_s) > 0:
        raise InvalidInput("the step takes no time: there is nothing to plot")
    if axes is None:
        height = max(3.6, 1.2 + 0.34 * len(_long_ops(c)))
        axes = plt.subplots(
            1, 2, figsize=(12.5, height), layout="constrained", width_ratios=(1.25, 1)
        )[1]
    assert axes is not None
    if len(axes) != 2:
        raise InvalidInput(f"axes must be two, for the step's parts and the ops, got {len(axes)}")
    _waterfall(c, axes[0])
    _ops(c, axes[1])
    return axes[0], axes[1]


def _waterfall(c: Comparison, ax: Axes) -> None:
    unit_s, unit = time_unit(max(c.predicted_period_s, c.measured_period_s))
    bars = _bars(c)
    names = ["measured", *(bar.name for bar in bars), "predicted"]
    levels = [c.measured_period_s]
    for bar in bars:
        levels.append(levels[-1] + bar.seconds)
    last = len(names) - 1
    # Differences are a few percent of the step: from 0 on they would be lines.
    low, high = min(*levels, c.predicted_period_s), max(*levels, c.predicted_period_s)
    room = max(high - low, 0.01 * high)
    bottom = max(0.0, low - 1.2 * room)
    if bottom < 0.25 * low:
        bottom = 0.0
    for x, level in ((0, c.measured_period_s), (last, c.predicted_period_s)):
        ax.bar(x, (level - bottom) / unit_s, 0.7, bottom / unit_s, color=_TOTAL)
        _note(ax, x, level / unit_s, format_seconds(level), bold=True)
    for x, bar in enumerate(bars, start=1):
        begin, end = levels[x - 1], levels[x]
        colour = _TOO_SLOW if bar.seconds > 0 else _TOO_FAST
        ax.bar(x, abs(bar.seconds) / unit_s, 0.7, min(begin, end) / unit_s, color=colour)
        share = bar.seconds / c.measured_period_s if c.measured_period_s > 0 else 0.0
        _note(ax, x, max(begin, end) / unit_s, f"{share:+.1%}".replace("-0.0%", "+0.0%"))
    for x, level in enumerate(levels):
        ax.plot((x - 0.35, x + 1.35), [level / unit_s] * 2, color="#999999", linewidth=0.7)
    ax.set_xticks(range(len(names)), names, fontsize=8.5)
    if len(names) > 5:
        ax.tick_params(axis="x", labelrotation=35)
        for label in ax.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    ax.set_ylim(bottom / unit_s, (high + 0.25 * max(high - bottom, room)) / unit_s)
    if bottom:
        _break(ax, (0, last))
    cut = f"; the axis starts at {format_seconds(bottom)}" if bottom else ""
    ax.set_ylabel(f"{unit} a step{cut}", fontsize=9)
    ax.set_xlabel("error in % of the measured step: red too slow, blue too fast", fontsize=8.5)
    error = "" if c.error != c.error else f": the mean step is predicted {_off(c.error)}"
    ax.set_title(f"{c.name}{error}", loc="left", fontsize=10)
    ax.grid(axis="y", linewidth=0.4, alpha=0.5)
    ax.tick_params(axis="x", length=0)
    bare(ax, "top", "right")


def _break(ax: Axes, bars: Sequence[int]) -> None:
    """White lines across the feet of bars that do not start at 0."""
    for x in bars:
        for low in (0.05, 0.08):
            ends, across = (x - 0.36, x + 0.36), (low, low + 0.03)
            ax.plot(ends, across, transform=ax.get_xaxis_transform(), color="white", linewidth=1.5)


def _note(ax: Axes, x: float, y: float, text: str, bold: bool = False) -> None:
    ax.annotate(
        text,
        (x, y),
        (0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        fontweight="bold" if bold else "normal",
    )


def _off(error: float) -> str:
    if abs(error) < 5e-4:
        return "right to 0.1%"
    return f"{abs(error):.1%} too {'slow' if error > 0 else 'fast'}"


def _bars(c: Comparison) -> list[_Bar]:
    """What lies between the periods, from the measured one on."""
    if c.predicted.cost is None:
        return [_Bar("not split", c.error_s)]
    bars = [_Bar(str(op), float(s)) for op, s in _named(c)["seconds"].items()]
    parts: Any = c.parts["seconds"]
    rest_s = float(parts["task cost"]) - sum(bar.seconds for bar in bars)
    if not bars or abs(rest_s) >= _LEAST * c.measured_period_s:
        bars.append(_Bar("other ops" if bars else "all ops", rest_s))
    return [*bars, *(_Bar(words, float(parts[part])) for part, words in _WORDS.items())]


def _named(c: Comparison) -> Any:
    """The rows of the ops that have a bar of their own in the waterfall."""
    cost: Any = c.task_cost
    return cost[cost["share"].abs() >= _LEAST].head(_MOST)


def _starred(c: Comparison) -> set[str]:
    """Ops that are off by as much as would be drawn, and are not in the waterfall."""
    if c.predicted.cost is None:
        return set()
    off: Any = (c.by_op["predicted_s"] - c.by_op["measured_s"]).abs()
    return set(off.index[off >= _LEAST * c.measured_period_s]) - set(_named(c).index)


def _long_ops(c: Comparison) -> Any:
    """The rows of the ops whose bars can be seen, a few at least."""
    longest: Any = c.by_op[["predicted_s", "measured_s"]].max(axis=1)
    n = int((longest >= _LEAST_BAR * longest.max()).sum())
    return c.by_op.head(min(_MOST_BARS, max(n, 4)))


def _ops(c: Comparison, ax: Axes) -> None:
    shown, starred = _long_ops(c), _starred(c)
    colours = op_colours(list(shown.index))
    most = max(*shown["predicted_s"], *shown["measured_s"])
    unit_s, unit = time_unit(most)
    for y, row in enumerate(shown.reset_index().to_dict("records")):
        ax.barh(y - 0.2, row["predicted_s"] / unit_s, 0.36, color=_PREDICTED)
        ax.barh(y + 0.2, row["measured_s"] / unit_s, 0.36, color=colours[row["op"]])
        longer = max(row["predicted_s"], row["measured_s"]) / unit_s
        text = "" if row["error"] != row["error"] else f" {row['error']:+.1%}"
        text += " *" if row["op"] in starred else ""
        ax.text(longer, y, text, va="center", fontsize=8.5)
    ax.set_yticks(range(len(shown)), [str(op) for op in shown.index], fontsize=8.5)
    ax.set_xlim(0, 1.22 * most / unit_s if most else 1.0)
    more = len(c.by_op) - len(shown)
    rest = f"; {more} shorter ops are not shown" if more else ""
    star = "\n* no bar on the left: the step does not wait for it, or others slow it (contention)"
    star = star if starred & set(shown.index) else ""
    ax.set_xlabel(f"{unit} a step, and the prediction's error{rest}{star}", fontsize=8.5)
    ax.set_title("What ops take. Grey: predicted. Coloured: measured", loc="left", fontsize=10)
    ax.invert_yaxis()
    ax.grid(axis="x", linewidth=0.4, alpha=0.5)
    ax.tick_params(axis="y", length=0)
    bare(ax, "top", "right", "left")
