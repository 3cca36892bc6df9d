"""What the predictions must show, and how far the results come."""

from __future__ import annotations

import judge
from judge import Data, Errors, Slopes
from kept import Kept
from markdown_pieces import table

POINTS, CURVE = 24, 11
PROFILE_S = 120.0
SUM = 1e-9
CI = "`tests/test_prediction_pipeline.py`, `tests/test_h200_prediction.py`"
Row = tuple[str, str, str]


def targets(kept: Kept) -> list[str]:
    """A table with a row for each thing: what, measured, met or missed by how much."""
    assert kept.predicted is not None
    points, curve = kept.predicted["points"], kept.predicted["curve"]
    rows = [
        *_calibration(kept.notes),
        *_step_times(judge.held_out(points)),
        *_ops(judge.held_out(points)),
        _parts(points),
        *_slopes(kept.slopes),
        _curve(curve),
        ("5. the same on CPU lanes, in the tests", CI, "yes"),
    ]
    return ["## What it must show", "", *table("what | measured | met", [list(r) for r in rows])]


def summary(kept: Kept) -> str:
    """What was found, in the sentence that README.md says it in."""
    assert kept.predicted is not None
    points = kept.predicted["points"]
    drawn = judge.held_out(points)
    e = Errors.of([p["error"] for p in drawn])
    layers = {p["model"]: p["layers"] for p in points}
    of = " and ".join(f"{n} layers of {model}" for model, n in layers.items())
    return (
        f"Of {e.n} points drawn at random, of {of}, the time of a step was predicted to "
        f"{e.median:.1%} in the median and {e.worst:.1%} at worst"
    )


def _calibration(notes: Data | None) -> list[Row]:
    if notes is None:
        return []
    what = f"calibrated by `moegen profile` alone, in {PROFILE_S:.0f} s"
    return [(what, f"{notes['seconds']:.0f} s", _below(notes["seconds"], PROFILE_S, " s"))]


def _step_times(points: list[Data]) -> list[Row]:
    models = sorted({p["model"] for p in points})
    n = f"{len(points)}, of {' and '.join(models)}" if points else "0"
    rows = [(f"1. at least {POINTS} held-out points", n, _at_least(len(points), POINTS))]
    if points:
        e = Errors.of([p["error"] for p in points])
        worst = max(points, key=lambda p: abs(p["error"]))
        what = f"{e.worst:.1%} ({worst['model']} {worst['name']})"
        rows += [
            ("1. time of a step, median error: 3%", f"{e.median:.1%}", _part(e.median, 0.03)),
            ("1. time of a step, worst: 6%", what, _part(e.worst, 0.06)),
        ]
    return rows


def _ops(points: list[Data]) -> list[Row]:
    rows = []
    errors = judge.op_errors(points)
    for name, some in (
        ("1. per op, median over points and ops: 5%", errors),
        (
            f"1. the same of ops that take {judge.LONG:.0%} of a step or more",
            [r for r in errors if r["share"] >= judge.LONG],
        ),
    ):
        if some:
            median = Errors.of([r["error"] for r in some]).median
            rows.append((name, f"{median:.1%} of {len(some)}", _part(median, judge.OP_MEDIAN)))
    return rows


def _parts(points: list[Data]) -> Row:
    worst = judge.part_sum_error(points)
    met = "yes" if worst <= SUM else f"**no**, {worst / SUM:.0f} times that"
    return "2. parts sum to the error: 1e-9 of the step", f"{worst:.0e}", met


def _slopes(slopes: Data | None) -> list[Row]:
    what = ("3. slopes agree in sign for all classes", "3. within 20% for those that bind")
    if slopes is None or not (rows := judge.slope_rows(slopes)):
        return [(name, "not measured", "**no**") for name in what]
    s = Slopes.of(rows)
    found = f"{s.agree} of {s.classes}, in {len(slopes['situations'])} situations"
    wrong = s.classes - s.agree - s.untold
    met = _at_least(s.classes - wrong, s.classes)
    if s.untold:
        found += f"; of {s.untold} the noise hides it"
        met = met if wrong else "yes, where it can be told"
    return [
        (what[0], found, met),
        (what[1], f"{s.close} of {s.binding}", _at_least(s.close, max(1, s.binding))),
    ]


def _curve(curve: list[Data]) -> Row:
    inside = sum(r["low"] <= r["measured_tokens_per_s"] <= r["high"] for r in curve)
    measured = f"{len(curve)}, {inside} within the band" if curve else "not measured"
    what = f"4. the curve over ω at {CURVE} points, predicted with bands and measured"
    return what, measured, _at_least(len(curve), CURVE)


def _at_least(n: int, wanted: int) -> str:
    return "yes" if n >= wanted else f"**no**, {wanted - n} short"


def _part(x: float, limit: float) -> str:
    return "yes" if x <= limit else f"**no**, by {100 * (x - limit):.1f} points"


def _below(x: float, limit: float, unit: str) -> str:
    return "yes" if x <= limit else f"**no**, by {x - limit:.0f}{unit}"
