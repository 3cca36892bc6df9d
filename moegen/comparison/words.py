"""A comparison for people and for JSON."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moegen.graph.hardware_text import gpu
from moegen.sim.same_machine import parts_of
from moegen.timeline import Timeline
from moegen.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from moegen.comparison.compare import Comparison

# Ops that have less to do with the error than this share of the period are not named.
_LEAST = 5e-4
_USED = "Work of a step, the time in which any of it is done, its error, and the rates in that time"
_RATES = ("predicted rate", "measured rate")


def as_text(c: Comparison) -> str:
    """Tables in columns."""
    table = [("op", "lane", "tasks", "predicted", "measured", "error")]
    ops, lanes = rows(c.by_op), rows(c.by_lane)
    table += [(row["op"], row["lane"], str(row["tasks"]), *_cells(row)) for row in ops]
    table.append(("", "", "", "", "", ""))
    table += [("all", row["lane"], str(row["tasks"]), *_cells(row)) for row in lanes]
    table.append(("period", "", "", *_period(c)))
    lines = [f"{c.name}, time of a step", *_columns(table, left=2)]
    if len(c.by_resource):
        used = [("resource", "a step", "predicted", "measured", "error", *_RATES)]
        used += [_use(row) for row in rows(c.by_resource)]
        lines += ["", _USED, *_columns(used, left=1)]
    if c.predicted.cost is not None:
        lines += ["", why(c)]
    if c.predicted_from or c.measured_on:
        lines += ["", *said_of(c)]
    return "\n".join(lines)


def said_of(c: Comparison) -> list[str]:
    """What the prediction rests on, and what was measured where."""
    from moegen.plot.labels import provenance_caption

    lines = []
    if c.predicted_from:
        lines.append(f"Predicted from {c.predicted_from}")
        caption = provenance_caption(c.predicted.provenance_shares())
        lines += [f"  {caption}"] if caption else []
    return [*lines, f"Measured on {c.measured_on or 'a machine that the timeline does not name'}"]


def predicted_from(predicted: Timeline) -> str:
    """What a simulated run rests on, and of which machine; empty if of none."""
    rests_on = predicted.meta.get("rests_on")
    machine = _machine(predicted)
    return f"{rests_on} ({machine})" if isinstance(rests_on, str) and machine else ""


def measured_on(measured: Timeline) -> str:
    """The machine that a run was on, and when; empty if it does not say."""
    date = measured.meta.get("date")
    said = [_machine(measured), date if isinstance(date, str) else ""]
    return ", ".join(text for text in said if text) if said[0] else ""


def _machine(timeline: Timeline) -> str:
    """GPU and CPU of the machine that a timeline is of; empty if it does not say."""
    return "; ".join(map(gpu, parts_of(timeline).values()))


def in_short(c: Comparison) -> str:
    """The period and its error."""
    predicted, measured, error = _period(c)
    return f"{c.name}: a step every {predicted} predicted, {measured} measured, error {error}"


def why(c: Comparison) -> str:
    """The error of the period in its parts, in words."""
    lines = [in_short(c)]
    for part, row in c.parts.iterrows():
        lines.append(f"  {row['share']:+7.2%} {part}")
        if part == "task cost":
            named = c.task_cost[c.task_cost["share"].abs() >= _LEAST]
            lines += [f"  {'':7} {row['share']:+7.2%} {op}" for op, row in named.iterrows()]
    return "\n".join(lines)


def as_html(c: Comparison) -> str:
    """Tables for a notebook."""
    tables = "".join(_shown(frame).to_html() for frame in (c.by_op, c.by_lane))
    if c.predicted.cost is not None:
        tables += f"<pre>{html.escape(why(c))}</pre>"
    if c.predicted_from or c.measured_on:
        tables += "".join(f"<div>{html.escape(line)}</div>" for line in said_of(c))
    return f"<div>{html.escape(in_short(c))}{tables}</div>"


def as_dict(c: Comparison) -> dict[str, Any]:
    """Plain data, for JSON; None where a number is undefined."""
    split = c.predicted.cost is not None
    return {
        "name": c.name,
        "predicted_steps": c.steps[0],
        "measured_steps": c.steps[1],
        "predicted_from": c.predicted_from or None,
        "measured_on": c.measured_on or None,
        "provenance": c.predicted.provenance_shares(),
        "predicted_period_s": c.predicted_period_s,
        "measured_period_s": c.measured_period_s,
        "error": _json(c.error),
        "parts": rows(c.parts) if split else None,
        "task_cost": rows(c.task_cost) if split else None,
        "by_op": rows(c.by_op),
        "by_lane": rows(c.by_lane),
        "by_resource": rows(c.by_resource),
    }


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Plain data; what is undefined is None."""
    records = frame.reset_index().to_dict("records")
    return [{str(k): _json(v) for k, v in row.items()} for row in records]


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _period(c: Comparison) -> tuple[str, str, str]:
    seconds = {"predicted_s": c.predicted_period_s, "measured_s": c.measured_period_s}
    return _cells({**seconds, "error": _json(c.error)})


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Predicted, measured and error of a row of :func:`rows`, for people."""
    error = "-" if row["error"] is None else f"{row['error']:+.1%}"
    return format_seconds(row["predicted_s"]), format_seconds(row["measured_s"]), error


def _use(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of resources: work and rates in units of a thousand million; both times, as of ops."""
    unit = row["unit"]
    rates = [row["predicted_per_s"], row["measured_per_s"]]
    shown = ["-" if rate is None else f"{rate / 1e9:.4g} G{unit}/s" for rate in rates]
    return (row["resource"], f"{row['work'] / 1e9:.4g} G{unit}", *_cells(row), *shown)


def _columns(table: Sequence[Sequence[str]], left: int) -> Iterable[str]:
    """Lines in which cells stand under each other, the first ``left`` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = list(zip(row, widths, strict=True))
        flush = [cell.ljust(n) for cell, n in cells[:left]]
        yield "  ".join(flush + [cell.rjust(n) for cell, n in cells[left:]]).rstrip()


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    predicted, measured, error = zip(*map(_cells, rows(frame)), strict=True)
    columns = {"predicted_s": predicted, "measured_s": measured, "error": error}
    shown = frame.assign(**{name: list(cells) for name, cells in columns.items()})
    if "median_error" in frame:
        medians = ["-" if math.isnan(e) else f"{e:+.1%}" for e in frame["median_error"]]
        shown = shown.assign(median_error=medians)
    return shown.rename(columns={"predicted_s": "predicted", "measured_s": "measured"})
