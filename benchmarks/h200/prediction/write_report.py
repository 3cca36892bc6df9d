"""Write REPORT.md beside this file from the results folder; a test holds it to the results.

    python benchmarks/h200/prediction/write_report.py

`measure.py`, `kept.py` and `predict.py` make the results, in this order; `ship.py` makes the
profile among them the one that ships with moegen.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import judge
import numpy as np
from judge import Data, Errors
from kept import HERE, RESULTS, Kept, leaving, of_this_script
from markdown_pieces import ms, pct, signed, table, where
from shown import noted, summary, targets
from shown_delays import delays
from shown_ops import ops

from moegen.graph.files import write_text
from moegen.sim.uncertainty import LEVEL

REPORT = HERE / "REPORT.md"
# Errors of the mean and of the median step that differ by more are explained.
APART = 0.01
# No compiler is quicker: the kernel was there.
_COMPILES_S = 0.5
WORDS = {
    "drawn, held-out": "points chosen by a random number generator, before anything was predicted; "
    "the profile knows nothing of them",
    "seed": "the number that the generator starts from: another seed, other points",
    "wave": "the prompts that one prefill step takes together",
    "op": "one kind of task, such as `expert` or `fetch_kv`; its tasks of a step count together",
    "roofline": "a task's work over the machine's rate, where nothing of its kind was measured",
    "band": f"what {LEVEL:.0%} of simulated runs lie within, if all tasks of an op are off "
    "together by what the profile's repeated measurements differ, and each task by what tasks "
    "scatter within the measured runs",
    "curve": "of an op: what its tasks take, by their size, as the profile measured it; of the "
    "report: throughput over ω",
    "slope": "by how much a step is longer for each second by which tasks are held back",
    "issuing thread": "the one CPU thread that hands every task to its lane",
    "rest": "a pause of that thread, after which it is slower for a while",
    "spread": "by how much the slowest run of a point is slower than the quickest",
    "tau (τ)": "Kendall's rank correlation of predicted and measured order: 1 if all pairs of "
    "points are in the right order, 0 if it is as good as drawn",
    "regret": "tokens a second that are lost by taking what is predicted best",
}


def report(folder: Path = RESULTS) -> str:
    """The report as Markdown, of the results in ``folder``."""
    kept = Kept(folder)
    gpu = kept.measured.get("machine", {}).get("gpu", "")
    lines = [
        f"# Predicted and measured on {'an H200' if 'H200' in gpu else 'another machine'}",
        "",
        "Written by `write_report.py` from `results/`, which `measure.py`, `kept.py` and "
        "`predict.py` made.",
        "",
    ]
    if not kept.there or kept.predicted is None or not kept.predicted["points"]:
        what = "predicted" if kept.there else "measured"
        return "\n".join([*lines, f"Nothing has been {what} yet.", ""])
    kept.check_predicted()
    points, curve = kept.predicted["points"], kept.predicted["curve"]
    lines += [
        *_setting(kept),
        *targets(kept),
        *_words(),
        *_notes(kept),
        *_others(kept),
        *_definition(),
        *_errors(points),
        *_points(points),
        *ops(points),
        *_parts(points),
        *_ranks(points, curve),
        *_curve(curve, judge.usual_miss(kept.others)),
        *delays(kept.slopes, _why(kept)),
        *_failed(kept.measured["failed"]),
    ]
    return "\n".join(lines)


def _why(kept: Kept) -> Data | None:
    """What is known of the delays of this measurement, and no other."""
    why = (kept.others or {}).get("delays")
    return why if why is not None and why["seed"] == kept.measured.get("seed") else None


def _setting(kept: Kept) -> list[str]:
    lines = where(kept.measured) if "machine" in kept.measured else []
    layers = {p["model"]: p["layers"] for p in kept.measured["points"]}
    ran = " and ".join(f"{n} layers of {model}" for model, n in layers.items())
    lines.append(f"Run: {ran}, with random weights.")
    if kept.notes is None:
        return [*lines, "What the profile took was not kept.", ""]
    compiled_s = kept.notes.get("compiled_s")
    after = f", after {compiled_s:.0f} s of compiling the CPU's kernel" if compiled_s else ""
    if after and compiled_s < _COMPILES_S:
        after = ", the CPU's kernel having been compiled before"
    lines.append(
        f"The calibration is `moegen profile` alone, of this machine; it took "
        f"{kept.notes['seconds']:.0f} s{after}."
    )
    return [*lines, ""]


def _notes(kept: Kept) -> list[str]:
    """What the profile says of itself, and what follows for the predictions."""
    lines = [f"- {note}." + (f" *So*: {so}." if so else "") for note, so in noted(kept)]
    if not lines:
        return []
    return ["## What the profile notes", "", *lines, ""]


def _words() -> list[str]:
    return ["## Words", "", *(f"- **{word}**: {means}" for word, means in WORDS.items()), ""]


def _others(kept: Kept) -> list[str]:
    """Whole measurements of which the raw data are not kept, for what they found."""
    if kept.others is None:
        return []
    rows = [
        [
            str(r["seed"]),
            r["date"],
            pct(r["step_median"]),
            pct(r["step_worst"]),
            pct(r["per_op"]),
            f"{r['slopes_within']} of {r['slopes']}",
            r["why"],
        ]
        for r in kept.others["measurements"]
    ]
    return [
        "## Other measurements",
        "",
        "Machines of one kind differ, and so do points that are drawn anew. These were made before "
        "the one above, of other seeds, on other machines, with the code and the profile of their "
        "day: how far one is off says little of how far the next will be. " + kept.others["since"],
        "",
        *table("seed | date | step, median | worst | per op | slopes within 20% | why", rows),
    ]


def _definition() -> list[str]:
    return [
        "## What is compared",
        "",
        "Points are drawn at random: model, phase, B, b_a, b_e, ω, slots, and the lengths of rows. "
        "The profile knows nothing of them. Each runs several times, all of them once before any "
        "runs again. The first step of a run, which finds the machine cold, is left out; of the "
        "others all but the first and the last count.",
        "",
        "**The time of a step is the median of the steps that count of the quickest run.** The "
        "machine is shared with others, whose work makes some runs slower and none faster. Beside "
        "it stand always the spread, by which the slowest run is slower than the quickest, and the "
        "error against the median of the steps of all runs. The prediction is `mg.simulate` on the "
        "lengths and the routing of that run, and the median of the same steps of it. Errors are "
        "predicted / measured - 1: above 0 where the prediction is too slow.",
        "",
    ]


def _errors(points: list[Data]) -> list[str]:
    rows = []
    for name, some in (("drawn at random", judge.held_out(points)), ("all", points)):
        for key, against in (("error", "quickest run"), ("all_runs_error", "all runs")):
            if some:
                e = Errors.of([p[key] for p in some])
                shares = [f"{e.within_median:.0%}", f"{e.within_worst:.0%}"]
                rows.append([name, str(e.n), against, pct(e.median), pct(e.worst), *shares])
    columns = "points | number | against | median error | worst | within 3% | within 6%"
    return ["## Errors of the time of a step", "", *table(columns, rows), *_fetching(points)]


def _fetching(points: list[Data]) -> list[str]:
    """Whether drawn points whose KV is fetched are off to one side."""
    said = []
    decode = [p for p in judge.held_out(points) if p["phase"] == "decode"]
    for model in dict.fromkeys(p["model"] for p in decode):
        some = [p for p in decode if p["model"] == model]
        rho = judge.trend([judge.fetch_share(p) for p in some], [p["error"] for p in some])
        if rho is not None:
            to = "too fast" if rho < 0 else "too slow"
            said.append(
                f"The errors of the {len(some)} drawn decode points of {model} have a trend: the "
                f"longer KV is fetched within a step, the more the prediction leans to {to} (rank "
                f"correlation of error and share of the step {rho:+.2f})."
            )
    long = [p for p in decode if judge.fetch_share(p) >= judge.FETCHES]
    errors = [p["error"] for p in long]
    if len(long) >= judge.SOME and (max(errors) < 0 or min(errors) > 0):
        low, high = sorted(abs(x) for x in (min(errors), max(errors)))
        side = "fast" if max(errors) < 0 else "slow"
        said.append(
            f"All {len(long)} drawn points that fetch KV for {judge.FETCHES:.0%} of a step or more "
            f"are predicted too {side}, by {low:.1%} to {high:.1%}: that is a bias, no scatter."
        )
    return [" ".join(said), ""] if said else []


def _points(points: list[Data]) -> list[str]:
    rows = []
    for p in points:
        s, (least, most) = p["strategy"], p["lengths"]
        slots = f"{p['expert_slots']}, {s['kv_slots']}, {s['dense_slots']}"
        rows.append(
            [
                p["model"],
                p["name"],
                f"{s['B']:,}",
                f"{least:,}" if least == most else f"{least:,} to {most:,}",
                f"{s['b_a']}, {s['b_e']:,}",
                f"{s['omega']:g}",
                slots,
                ms(p["predicted_s"]),
                ms(p["measured_s"]),
                signed(p["error"]),
                "one run" if p["spread"] is None else pct(p["spread"]),
                signed(p["all_runs_error"]),
            ]
        )
    columns = (
        "model | point | B | tokens of a row | b_a, b_e | ω | slots: experts, KV, dense | "
        "predicted | measured | error | spread | error against all runs"
    )
    return ["## Points", "", *table(columns, rows)]


def _parts(points: list[Data]) -> list[str]:
    names = list(points[0]["parts"])
    rows = []
    for p in points:
        M = p["measured_period_s"]
        parts = [signed(p["parts"][name] / M) for name in names]
        rest = sum(p["parts"].values()) - p["period_error_s"]
        errors = [signed(p["error"]), signed(p["period_error_s"] / M)]
        rows.append([p["model"], p["name"], *errors, *parts, f"{abs(rest) / M:.0e}"])
    columns = f"model | point | median step | mean step | {' | '.join(names)} | missed"
    return [
        "## Parts of the error",
        "",
        "As `moegen.compare` splits it, the error of the **mean** step: the parts sum to that one, "
        "not to the error of the median step, which the tables above have and which stands beside "
        "it. All are shares of the measured step, above 0 where they make the prediction too slow. "
        "The last column is what the parts' sum misses of the error of the mean step.",
        "",
        "- **Task cost**: what tasks take alone. An op that hides behind others is not in it, "
        "however wrong it is.",
        "- **Scheduling and contention**: when tasks ran, and how they slowed each other.",
        "- **Untracked overhead**: the measured durations are replayed through graph and issuing "
        "thread, and this is the replay less the step. Below 0 the step took longer than its tasks "
        "explain: they waited for something that is no edge. Above 0 it took less: the thread, "
        "which hands tasks over, is slower in the prediction than it was, or tasks overlapped "
        "that the prediction keeps apart.",
        "",
        *table(columns, rows),
        *_disturbed(points),
    ]


def _disturbed(points: list[Data]) -> list[str]:
    """Points whose mean step is not their median step."""
    lines = [
        f"- {p['model']} {p['name']}: a step took {ms(p['measured_s'])} in the median and "
        f"{ms(p['measured_period_s'])} in the mean"
        for p in points
        if abs(p["error"] - p["period_error_s"] / p["measured_period_s"]) > APART
    ]
    if not lines:
        return []
    head = "Median and mean tell different errors where the steps of a run differ much:"
    return [head, "", *lines, ""]


def _ranks(points: list[Data], curve: list[Data]) -> list[str]:
    rows = []
    on_curve = [p for p in points if p["name"].startswith("omega-")]
    for name, some in (
        ("drawn at random", judge.held_out(points)),
        ("curve over ω", on_curve),
        ("all", points),
    ):
        step, tokens = (judge.ranking(some, key) for key in ("step", "tokens"))
        if step.pairs or tokens.pairs:
            rows.append([name, _tau(step), _tau(tokens)])
    lines = [
        "## Order, and what a choice by prediction loses",
        "",
        "Kendall's τ over pairs of points of one model and phase that differ by more than twice "
        "the spread from run to run.",
        "",
        *table("points | by the time of a step | by tokens a second", rows),
    ]
    regrets = judge.regrets(points, curve)
    if regrets:
        lines += table(
            "choice | chosen | best measured | tokens a second lost",
            [[r["what"], r["chosen"], r["best"], pct(r["regret"])] for r in regrets],
        )
    return lines


def _tau(r: judge.Ranking) -> str:
    return f"{r.tau:.3f} of {r.pairs} pairs, {r.left_out} too close" if r.pairs else "no pairs"


def _curve(curve: list[Data], miss: float) -> list[str]:
    if not curve:
        return ["## The curve over ω", "", "It has not been measured.", ""]
    rows = [
        [
            f"{r['omega']:g}",
            f"{r['tokens_per_s']:,.0f}",
            _from_to(r),
            *([_from_to(r, miss)] if miss else []),
            f"{r['measured_tokens_per_s']:,.0f}",
            f"{r['measured_low']:,.0f}",
            signed(off),
            _inside(r, miss),
            f"{r['probability_best']:.0%}",
        ]
        for r, off in zip(curve, judge.curve_errors(curve), strict=True)
    ]
    wide = "widened | " if miss else ""
    columns = (
        f"ω | predicted tokens/s | {LEVEL:.0%} of samples | {wide}measured, quickest run | "
        f"slowest run | measured / predicted - 1 | within | how probably the best"
    )
    return [
        "## The curve over ω",
        "",
        f"{len(curve)} points that differ in ω alone. What the simulator or the profile gets wrong "
        f"in the same way each time is not in the band. Measured / predicted - 1 is below 0 where "
        f"the prediction is too fast.",
        "",
        *_widened(miss),
        *table(columns, rows),
        *_bias(curve, miss),
    ]


def _widened(miss: float) -> list[str]:
    if not miss:
        return []
    return [
        f"Widened: as if the whole step were off besides, by as much as steps were in the other "
        f"measurements above: a standard deviation of {miss:.1%}, from the median of their "
        f"medians. No number of this measurement is in it; that there should be such a band was "
        f"decided when points of this curve, as of others before, lay outside of the other.",
        "",
    ]


def _from_to(row: Data, miss: float = 0.0) -> str:
    low, high = judge.band(row, miss)
    return f"{low:,.0f} to {high:,.0f}"


def _inside(row: Data, miss: float) -> str:
    if judge.is_inside(row):
        return "yes"
    return "widened" if miss and judge.is_inside(row, miss) else "no"


def _bias(curve: list[Data], miss: float = 0.0) -> list[str]:
    """Whether the points of the curve scatter about the prediction, drift, or lie to one side."""
    off, c = judge.curve_errors(curve), judge.Coverage.of(curve)
    reach = float(np.median([(r["high"] - r["low"]) / r["tokens_per_s"] / 2 for r in curve]))
    size, side = float(np.median(np.abs(off))), judge.bias(curve)
    width = (
        f"The band reaches {reach:.1%} to either side in the median; points are {size:.1%} off. "
        f"{c.inside} of {c.n} lie within it, and {c.expected} would be expected of {LEVEL:.0%}."
    )
    if c.short:
        width += " So the band is too narrow: it does not hold what the profile misses."
        if miss:
            width += f" Within the widened one lie {judge.Coverage.of(curve, miss).inside}."
    rho = judge.trend([r["omega"] for r in curve], off)
    if rho is not None:
        return [f"{width} {_drift(curve, off, rho)}", ""]
    if len(off) < judge.SOME:
        return [width, ""]
    if not side:
        return [f"{width} They lie on both sides of the prediction, without a trend over ω.", ""]
    count, word = sum(side * x > 0 for x in off), "above" if side > 0 else "below"
    return [
        f"{width} {count} of {len(off)} lie {word} the prediction: that is a bias which they "
        f"share, and no scatter. The order of points suffers less from it than their height.",
        "",
    ]


def _drift(curve: list[Data], off: list[float], rho: float) -> str:
    """The trend of the error over ω, and what it does to the curve's shape."""
    first, last = curve[0], curve[-1]
    ends = " and ".join(
        f"{abs(x):.1%} too {'fast' if x < 0 else 'slow'} at ω = {r['omega']:g}"
        for r, x in ((first, off[0]), (last, off[-1]))
    )
    told, found = (last[key] / first[key] - 1 for key in ("tokens_per_s", "measured_tokens_per_s"))
    return (
        f"The error has a trend over ω (rank correlation {rho:+.2f}): the prediction is {ends}. "
        f"That is a bias, no scatter, and it goes with what ω moves from the link to the CPU. So "
        f"the predicted curve is {'less' if abs(told) < abs(found) else 'more'} steep than the "
        f"measured one: from ω = {first['omega']:g} to "
        f"{last['omega']:g} throughput changes by {told:+.0%} as predicted, by {found:+.0%} as "
        f"measured."
    )


def _failed(failed: list[Data]) -> list[str]:
    if not failed:
        return []
    lines = [f"- {x['model']} {x['point']}: a run hung or broke off" for x in failed]
    return ["## Points that failed", "", *lines, ""]


def main() -> None:
    of_this_script(__doc__).parse_args()
    write_text(REPORT, report(), "the report")
    if (kept := Kept()).predicted is not None and kept.predicted["points"]:
        print("README.md, Status:", *summary(kept))


if __name__ == "__main__":
    leaving(main)
