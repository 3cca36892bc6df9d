"""What the predictions must show, and how far the results come."""

from __future__ import annotations

from collections.abc import Iterable

import judge
from judge import Data, Errors, Slopes
from kept import HERE, SAME, Kept
from markdown_pieces import table

from moegen.sim.uncertainty import LEVEL

POINTS, CURVE = 24, 11
PROFILE_S = 120.0
SUM = 1e-9
CI = ("tests/test_prediction_pipeline.py", "tests/test_h200_prediction.py")
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
        _curve(curve, judge.usual_miss(kept.others)),
        _on_cpu_lanes(),
    ]
    return [
        "## What it must show",
        "",
        *table("what | measured | met", [list(r) for r in rows]),
        " ".join([*blind(kept), *_today(kept)]),
        "",
    ]


def summary(kept: Kept) -> list[str]:
    """What was found, in the sentences that README.md says it in."""
    assert kept.predicted is not None
    points = kept.predicted["points"]
    drawn, now = judge.held_out(points), judge.errors(points)
    if now is None:
        return []
    every = Errors.of([p["error"] for p in points])
    layers = {p["model"]: p["layers"] for p in points}
    of = " and ".join(f"{n} layers of {model}" for model, n in layers.items())
    said = [
        f"Of {len(drawn)} points drawn at random, of {of}, the time of a step was predicted to "
        f"{now['step_median']:.1%} in the median and {now['step_worst']:.1%} at worst.",
        "That is against the quickest run of each point.",
        f"Operations were predicted to {now['per_op']:.1%} in the median.",
    ]
    if every.n > len(drawn):
        said.append(
            f"Of all {every.n} points, a curve over ω and the planner's choice among them, the "
            f"worst is {every.worst:.1%}."
        )
    return [*said, *_curve_words(kept), *blind(kept), *_other_measurements(kept)]


def blind(kept: Kept) -> list[str]:
    """Whether those who wrote the code had seen the runs, in sentences."""
    first, ran = kept.first, kept.measured.get("machine", {}).get("code")
    if first is None:
        return ["The points were drawn blind; what was predicted first is not known."]
    if was := _before(kept):
        return [
            "The points were drawn blind.",
            f"The code was changed after these runs had been seen. By the code before, steps were "
            f"predicted to {was['step_median']:.1%} in the median and {was['step_worst']:.1%} at "
            f"worst, and operations to {was['per_op']:.1%}.",
        ]
    by = ", by the code that ran the points" if first["code"] == ran else ""
    return [f"The points were drawn blind, and these are the predictions that were made first{by}."]


def _before(kept: Kept) -> Data | None:
    """What was predicted first, if it differs from what is predicted today."""
    assert kept.predicted is not None
    now = judge.errors(kept.predicted["points"])
    if kept.first is None or now is None:
        return None
    was, errors = kept.first["errors"], now["errors"]
    same = was.keys() == errors.keys() and all(abs(was[k] - errors[k]) <= SAME for k in was)
    return None if same else kept.first


def noted(kept: Kept) -> list[tuple[str, str]]:
    """What the profile notes, and behind each note what it means for the predictions.

    The meaning is empty where the next note has the same, or where nothing is known.
    """
    notes: list[str] = (kept.notes or {}).get("notes", [])
    means = [next((x for words, x in _MEANS if words in note), "") for note in notes]
    after = [*means[1:], ""][: len(means)]
    return [
        (note, so if so != following else "")
        for note, so, following in zip(notes, means, after, strict=True)
    ]


_MEANS = (
    (
        "there was no time left",
        "tasks of these ops at other sizes are predicted from the nearest measured size and the "
        "machine's rates, and less surely",
    ),
)


def _today(kept: Kept) -> list[str]:
    """The same errors by the code of today."""
    assert kept.predicted is not None
    now = judge.errors(kept.predicted["points"])
    if now is None or not _before(kept):
        return []
    return [
        f"By the code of today, as above, it is {now['step_median']:.1%}, "
        f"{now['step_worst']:.1%} and {now['per_op']:.1%}."
    ]


def _curve_words(kept: Kept) -> list[str]:
    """What is to be said of a curve whose error is no scatter, or whose band is too narrow."""
    assert kept.predicted is not None
    curve = kept.predicted["curve"]
    if not curve:
        return []
    said, c, miss = [], judge.Coverage.of(curve), judge.usual_miss(kept.others)
    if judge.trend([r["omega"] for r in curve], judge.curve_errors(curve)) is not None:
        said.append("On that curve the error is no scatter but a bias that goes with ω.")
    elif side := judge.bias(curve):
        word = "slow" if side > 0 else "fast"
        said.append(f"On that curve most points are predicted too {word}: a bias, no scatter.")
    if c.short:
        said.append(
            f"Bands are too narrow for what a profile misses: {c.inside} of {c.n} points of the "
            f"curve lie within the {LEVEL:.0%} band, {c.expected} would be expected."
        )
        if miss:
            said.append(
                f"Widened by what other measurements missed, it holds "
                f"{judge.Coverage.of(curve, miss).inside}."
            )
    return said


def _other_measurements(kept: Kept) -> list[str]:
    found = kept.others["measurements"] if kept.others else []
    if not found:
        return []
    median, worst, per_op = (
        f"{min(each):.1%} to {max(each):.1%}"
        for each in ([r[key] for r in found] for key in ("step_median", "step_worst", "per_op"))
    )
    return [
        f"In {len(found)} other measurements, of other points, on other machines and by the code "
        f"of their day, the median was {median}, the worst {worst}, and operations were predicted "
        f"to {per_op}."
    ]


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
            (
                f"1. time of a step, median error: {judge.MEDIAN:.0%}",
                f"{e.median:.1%}",
                _part(e.median, judge.MEDIAN),
            ),
            (f"1. time of a step, worst: {judge.WORST:.0%}", what, _part(e.worst, judge.WORST)),
        ]
    return rows


def _ops(points: list[Data]) -> list[Row]:
    rows = []
    errors = judge.op_errors(points)
    for name, some in (
        (f"1. per op, median over points and ops: {judge.OP_MEDIAN:.0%}", errors),
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
    # Untracked overhead is what the other two leave.
    found = f"{worst:.0e}, as they must: the last of them is what the others leave"
    return f"2. parts sum to the error: {SUM:.0e} of the step".replace("e-0", "e-"), found, met


def _slopes(slopes: Data | None) -> list[Row]:
    what = (
        "3. slopes agree in sign for all classes",
        f"3. within {judge.SLOPE:.0%} for those that bind",
    )
    if slopes is None or not (rows := judge.slope_rows(slopes)):
        return [(name, "not measured", "**no**") for name in what]
    s = Slopes.of(rows)
    found = f"{s.agree} of {s.classes}, in {len(slopes['situations'])} situations"
    wrong = s.classes - s.agree - s.edge - s.untold
    met = _at_least(s.classes - wrong, s.classes)
    if s.edge:
        found += f"; {s.edge} where a slope begins to count ({judge.NONE:g} by task): " + _which(
            r for r in rows if r["agrees"] and not r["told"] and r["edge"]
        )
    if s.untold:
        found += f"; of {s.untold} the noise hides it"
    if wrong:
        found += f"; not of {_which(r for r in rows if not r['agrees'])}"
    if s.untold:
        met = met if wrong else "yes, where it can be told"
    return [
        (what[0], found, met),
        (what[1], f"{s.close} of {s.binding}", _at_least(s.close, max(1, s.binding))),
    ]


def _which(rows: Iterable[Data]) -> str:
    return " and ".join(f"`{r['op']}` where {r['situation']}" for r in rows)


def _on_cpu_lanes() -> Row:
    missing = [name for name in CI if not (HERE.parents[2] / name).exists()]
    met = f"**no**, there is no {missing[0]}" if missing else "run by them"
    return "5. the same on CPU lanes, in the tests", ", ".join(f"`{name}`" for name in CI), met


def _curve(curve: list[Data], miss: float = 0.0) -> Row:
    c = judge.Coverage.of(curve)
    measured = "not measured"
    if curve:
        measured = (
            f"{c.n}, measured and predicted with bands; {c.inside} within the {LEVEL:.0%} band, "
            f"{c.expected} would be expected"
        )
    if c.short:
        measured += ": the band does not hold what the profile misses"
        if miss:
            inside = judge.Coverage.of(curve, miss).inside
            measured += f"; {inside} once it is widened by what other measurements missed"
    what = f"4. the curve over ω at {CURVE} points, measured and predicted with bands"
    return what, measured, _at_least(len(curve), CURVE)


def _at_least(n: int, wanted: int) -> str:
    return "yes" if n >= wanted else f"**no**, {wanted - n} short"


def _part(x: float, limit: float) -> str:
    return "yes" if x <= limit else f"**no**, by {100 * (x - limit):.1f} points"


def _below(x: float, limit: float, unit: str) -> str:
    return "yes" if x <= limit else f"**no**, by {x - limit:.0f}{unit}"
