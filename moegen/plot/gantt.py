"""Gantt charts: when each lane ran what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from moegen.errors import InvalidInput
from moegen.plot.labels import Labels
from moegen.plot.style import FAINT, LANE_WORDS, bare, ink, letters, op_colours, time_unit, width_in
from moegen.timeline import SOURCES, Timeline
from moegen.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHERS = "(not selected)"
# Of a lane's width, how much the edges of narrow bars may add to what they cover.
_EDGES_SHARE = 0.03
# More layers than this in view are slivers: two of them are shown unless others are asked for.
_FEW_LAYERS = 4


def gantt(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    steps: int | Collection[int] | None = None,
    layers: int | Collection[int] | None = None,
) -> Axes:
    """A Gantt chart: a row a lane (GPU, CPU, BULK, KV, ACT), a colour an op.

    Under each lane's name stands what it does and how busy it is in the time shown, other
    steps and layers included: they are drawn in a faint grey, so that a lane at work on the
    next layer does not look idle, with the number of their layer where there is room.

    Parameters
    ----------
    timeline : Timeline
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.
    steps, layers : int or collection of int, optional
        Which ones to show; all by default. Tasks outside any layer have layer -1.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    InvalidInput
        If no task is left to show.
    """
    import matplotlib.pyplot as plt

    chart = _Chart(timeline, steps, layers)
    if ax is None:
        _, ax = plt.subplots(figsize=(13, 1.6 + 0.62 * len(chart.lanes)), layout="constrained")
    chart.draw(ax)
    _draw_legend(ax, [chart])
    return ax


def predicted_and_measured(
    predicted: Timeline,
    measured: Timeline,
    *,
    steps: int | Collection[int] | None = None,
    layers: int | Collection[int] | None = None,
    figure: Figure | None = None,
) -> tuple[Axes, Axes]:
    """Two Gantt charts on one time axis: the prediction above, the measurement below.

    Each begins at the first of its tasks that are shown, so bars that are as long as predicted
    look alike, and the chart that reaches further to the right was slower.

    Parameters
    ----------
    predicted, measured : Timeline
        Of one graph, or of graphs with layers in common.
    steps : int or collection of int, optional
        Which ones to show; by default one that both have, from the middle of the run.
    layers : int or collection of int, optional
        By default all of a few; of many, two from the middle.
    figure : matplotlib.figure.Figure, optional
        Where to draw; a new one by default.

    Returns
    -------
    tuple of matplotlib.axes.Axes
        The upper and the lower one.

    Raises
    ------
    InvalidInput
        If one of them has no task to show.
    """
    import matplotlib.pyplot as plt

    both = (predicted, measured)
    if steps is None:
        steps = _middle([set(t.steps) for t in both], 1, "step")
    if layers is None:
        of = [{i.layer for i in t.ids if i.layer >= 0} for t in both]
        few = min(map(len, of)) <= _FEW_LAYERS
        layers = None if few else _middle(of, 2, "layer")
    above, below = charts = [_Chart(t, steps, layers) for t in both]
    n_lanes = [len(chart.lanes) for chart in charts]
    if figure is None:
        figure = plt.figure(figsize=(13, 2.4 + 0.62 * sum(n_lanes)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": n_lanes})
    span_s = max(above.span_s, below.span_s)
    for chart, ax in zip(charts, (upper, lower), strict=True):
        chart.draw(ax, origin_s=chart.begin_s, span_s=span_s)
    upper.set_xlabel("")
    _draw_legend(upper, charts)
    return upper, lower


def _middle(of: Sequence[set[int]], n: int, what: str) -> list[int]:
    """``n`` neighbours from the middle of what both have."""
    common = sorted(set.intersection(*of))
    if not common:
        raise InvalidInput(
            f"the timelines have no {what} in common: {sorted(of[0])} and {sorted(of[1])}"
        )
    first = max(0, (len(common) - n) // 2)
    return common[first : first + n]


class _Chart:
    """What is to be drawn of a timeline: tasks, lanes, the time they span."""

    def __init__(
        self,
        timeline: Timeline,
        steps: int | Collection[int] | None,
        layers: int | Collection[int] | None,
    ) -> None:
        self.timeline, self.chosen = timeline, (steps, layers)
        ids = timeline.ids
        shown = [i for i, t in enumerate(ids) if _among(t.step, steps) and _among(t.layer, layers)]
        if not shown:
            raise InvalidInput(f"no task in steps {steps} and layers {layers}: nothing to plot")
        self.keep = set(shown)
        self.lanes = {
            lane: members
            for lane, members in timeline.by_lane.items()
            if not self.keep.isdisjoint(members)
        }
        self.begin_s = float(timeline.start_s[shown].min())
        self.end_s = float(timeline.end_s[shown].max())
        self.span_s = self.end_s - self.begin_s
        self.colours = op_colours([ids[i].op for i in shown])
        self.many = len({(ids[i].step, ids[i].layer) for i in shown}) > 1

    def draw(self, ax: Axes, *, origin_s: float = 0.0, span_s: float | None = None) -> None:
        """Draw it, with ``origin_s`` at 0, on an axis of ``span_s``: that of its own tasks."""
        self.origin_s = origin_s
        span_s = self.span_s if span_s is None else span_s
        self.scale, unit = time_unit(span_s)
        self.width_pt = 72 * width_in(ax)
        self.labels = Labels(self.timeline, span_s, letters(ax), self.many)
        for y, (lane, members) in enumerate(self.lanes.items()):
            self._draw_others(ax, y, [i for i in members if i not in self.keep])
            self._draw_bars(ax, y, [i for i in members if i in self.keep])
            spans = self.timeline.spans_s(members, self.begin_s, self.end_s)
            busy = sum(b - a for a, b in spans) / self.span_s if self.span_s else 0.0
            ax.annotate(
                f"{LANE_WORDS[lane]}\n{busy:.0%} busy",
                (0, y),
                (-8, -7),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=6.5,
                color="#555555",
            )
        steps_end = self._draw_steps(ax)
        ax.set_yticks(range(len(self.lanes)), [lane.value for lane in self.lanes], va="bottom")
        ax.set_ylim(len(self.lanes) - 0.45, -0.55)
        margin = 0.005 * span_s or 0.5 * self.scale  # tasks that all take no time
        left = self.begin_s - origin_s
        ax.set_xlim((left - margin) / self.scale, (left + span_s + margin) / self.scale)
        ax.set_xlabel(f"time [{unit}]")
        ax.set_title(self._title(), loc="left", fontsize=10, pad=14 if steps_end else 6)
        ax.grid(axis="x", linewidth=0.4, alpha=0.5)
        ax.tick_params(axis="y", length=0)
        bare(ax, "top", "right", "left")

    def _draw_bars(self, ax: Axes, y: int, drawn: Sequence[int]) -> None:
        timeline, ids = self.timeline, self.timeline.ids
        lasted = timeline.end_s - timeline.start_s
        narrow = 0.004 * self.labels.span_s
        # An edge lets a narrow bar be seen. Edges of thousands would fill a lane that is idle.
        n_narrow = int((lasted[list(drawn)] <= narrow).sum())
        edge_pt = min(0.6, _EDGES_SHARE * self.width_pt / max(1, n_narrow))
        for op, colour in self.colours.items():
            members = [i for i in drawn if ids[i].op == op]
            for wide in (True, False):
                some = [i for i in members if (lasted[i] > narrow) == wide]
                if some:
                    # A white edge parts neighbours of one op, but would swallow a narrow bar.
                    ax.broken_barh(
                        [(self._x(timeline.start_s[i]), lasted[i] / self.scale) for i in some],
                        (y - 0.4, 0.8),
                        facecolors=colour,
                        edgecolors="white" if wide else colour,
                        linewidth=0.6 if wide else edge_pt,
                        snap=wide,  # to whole pixels, which would drop some and widen others
                    )
        for first, last, text in self.labels.of(drawn):
            colour = self.colours[ids[first].op]
            middle = self._x((timeline.start_s[first] + timeline.end_s[last]) / 2)
            ax.text(
                middle,
                y,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color=ink(colour),
                clip_on=True,
                # Over a row of bars it hides their edges, or it could not be read.
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.5},
            )

    def _draw_others(self, ax: Axes, y: int, others: Sequence[int]) -> None:
        """What was not selected, in grey; its layer where the part in view has room for it."""
        timeline, begin, end = self.timeline, self.begin_s, self.end_s
        seen = [i for i in others if timeline.end_s[i] > begin and timeline.start_s[i] < end]
        if not seen:
            return
        self.colours |= {OTHERS: FAINT}
        for left, right in timeline.spans_s(seen, begin, end):
            width = (right - left) / self.scale
            ax.barh(y, width, 0.8, self._x(left), color=FAINT, zorder=0.5)
        for first, left, right in self.labels.layers(seen, begin, end):
            ax.text(
                self._x((left + right) / 2),
                y,
                self.labels.layer(first),
                ha="center",
                va="center",
                fontsize=7,
                color="#777777",
            )

    def _draw_steps(self, ax: Axes) -> bool:
        """A line where a step's last task ended, if the next one is in view; whether any.

        None at all where there is no room for their names.
        """
        ends = dict(zip(self.timeline.steps, self.timeline.step_end_s.tolist(), strict=True))
        shown = sorted({self.timeline.ids[i].step for i in self.keep})
        lines = [(k, ends[k]) for k in shown[:-1] if self.begin_s < ends[k] < self.end_s]
        texts = [f"step {step} ends " for step, _ in lines]
        if sum(map(len, texts)) > self.labels.letters:
            return False
        for text, (_, end_s) in zip(texts, lines, strict=True):
            at = self._x(end_s)
            ax.axvline(at, color="black", linewidth=0.8, linestyle=(0, (2, 2)))
            ax.text(at, -0.57, text, ha="right", va="bottom", fontsize=6.5, color="#555555")
        return bool(lines)

    def _x(self, at_s: float) -> float:
        return (at_s - self.origin_s) / self.scale

    def _title(self) -> str:
        timeline = self.timeline
        whole = format_seconds(timeline.makespan_s)
        text = f"{timeline.name}, {SOURCES[timeline.source]}: {whole}"
        n = len(timeline.steps)
        if n > 1:
            text += f" for {n} steps, {format_seconds(timeline.period_s)} a step"
        for name, which in zip(("step", "layer"), self.chosen, strict=True):
            if which is not None:
                listed = [which] if isinstance(which, int) else sorted(which)
                text += f"; {name}{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
        return text


def _among(value: int, chosen: int | Collection[int] | None) -> bool:
    if chosen is None:
        return True
    return value == chosen if isinstance(chosen, int) else value in chosen


def _draw_legend(ax: Axes, charts: Sequence[_Chart]) -> None:
    from matplotlib.patches import Patch

    of_all: dict[str, str] = {}
    for chart in charts:
        of_all |= chart.colours
    faint = {OTHERS: FAINT} if of_all.pop(OTHERS, None) else {}
    colours = op_colours(of_all) | faint
    rows = sum(len(chart.lanes) for chart in charts)
    ax.legend(
        handles=[Patch(color=colour, label=op) for op, colour in colours.items()],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        fontsize=7.5,
        frameon=False,
        ncols=1 if len(colours) <= 2 + 3 * rows else 2,
        handlelength=1.2,
        labelspacing=0.25,
    )
