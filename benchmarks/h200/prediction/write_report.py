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
from judge import Data, Errors
from kept import HERE, RESULTS, Kept
from markdown_pieces import ms, table, where
from shown import targets

REPORT = HERE / "REPORT.md"


def report(folder: Path = RESULTS) -> str:
    """The report as Markdown, of the results in ``folder``."""
    kept = Kept(folder)
    lines = [
        "# Predicted and measured on an H200",
        "",
        "Written by `write_report.py` from `results/`, which `measure.py`, `kept.py` and "
        "`predict.py` made.",
        "",
    ]
    if not kept.there or kept.predicted is None:
        what = "predicted" if kept.there else "measured"
        return "\n".join([*lines, f"Nothing has been {what} yet.", ""])
    points, curve = kept.predicted["points"], kept.predicted["curve"]
    lines += [
        *_setting(kept),
        *targets(kept),
        *_definition(),
        *_errors(points),
        *_points(points),
        *_ops(points),
        *_parts(points),
        *_ranks(points, curve),
        *_curve(curve),
        *_slopes(kept.slopes),
        *_failed(kept.measured["failed"]),
    ]
    return "\n".join(lines)


def _setting(kept: Kept) -> list[str]:
    lines = where(kept.measured) if "machine" in kept.measured else []
    layers = {p["model"]: p["layers"] for p in kept.measured["points"]}
    ran = " and ".join(f"{n} layers of {model}" for model, n in layers.items())
    lines.append(f"Run: {ran}, at true width, with random weights.")
    if kept.notes is None:
        return [*lines, "What the profile took was not kept.", ""]
    lines.append(
        f"The calibration is `moegen profile` alone, of this machine; it took "
        f"{kept.notes['seconds']:.0f} s."
    )
    lines += ["", *(f"- left out of the profile: {note}" for note in kept.notes["notes"]), ""]
    return lines


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
                rows.append([name, str(e.n), against, _pct(e.median), _pct(e.worst), *shares])
    columns = "points | number | against | median error | worst | within 3% | within 6%"
    return ["## Errors of the time of a step", "", *table(columns, rows)]


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
                _signed(p["error"]),
                "one run" if p["spread"] is None else _pct(p["spread"]),
                _signed(p["all_runs_error"]),
            ]
        )
    columns = (
        "model | point | B | tokens of a row | b_a, b_e | ω | slots: experts, KV, dense | "
        "predicted | measured | error | spread | error against all runs"
    )
    return ["## Points", "", *table(columns, rows)]


def _ops(points: list[Data]) -> list[str]:
    found = judge.by_op(points)
    rows = [
        [
            f"`{r['op']}`",
            r["lane"],
            str(r["points"]),
            _pct(r["share"]),
            _time(r["task_s"]),
            _pct(r["median"]),
            _signed(r["signed"]),
            f"{r['of_step']:+.2%}",
            "-" if r["spread"] is None else _pct(r["spread"]),
        ]
        for r in found
    ]
    columns = (
        "op | lane | points | share of a step | a task | median error | with its sign | "
        "of a step | run to run"
    )
    missing = [f"- `{r['op']}`: {r['why']}" for r in found if not r["met"]]
    return [
        "## Ops",
        "",
        "Over all points. Seconds of all tasks of an op in a step: predicted is the mean over the "
        "steps, measured the median, task by task. The error is the median over points, without "
        "and with its sign, and with its sign as a share of the step. Lanes run beside one "
        "another, so shares of a step add up to more than 100%. Run to run: by how much the op's "
        "time differs between the runs of a point, in the median.",
        "",
        *table(columns, rows),
        "Those that miss 5%, and what the data show:" if missing else "None misses 5%.",
        "",
        *missing,
        *([""] if missing else []),
    ]


def _parts(points: list[Data]) -> list[str]:
    names = list(points[0]["parts"])
    rows = []
    for p in points:
        M = p["measured_period_s"]
        parts = [_signed(p["parts"][name] / M) for name in names]
        rest = sum(p["parts"].values()) - p["period_error_s"]
        error = _signed(p["period_error_s"] / M)
        rows.append([p["model"], p["name"], error, *parts, f"{abs(rest) / M:.0e}"])
    return [
        "## Parts of the error",
        "",
        "Of the mean step, as `moegen.compare` splits it: what tasks alone cost, when they ran and "
        "how they slowed each other, and what nothing tracks. Shares of the measured step. The "
        "last column is what the parts' sum misses of the error.",
        "",
        *table(f"model | point | error | {' | '.join(names)} | missed", rows),
    ]


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
            [[r["what"], r["chosen"], r["best"], _pct(r["regret"])] for r in regrets],
        )
    return lines


def _tau(r: judge.Ranking) -> str:
    return f"{r.tau:.3f} of {r.pairs} pairs, {r.left_out} too close" if r.pairs else "no pairs"


def _curve(curve: list[Data]) -> list[str]:
    if not curve:
        return ["## The curve over ω", "", "It has not been measured.", ""]
    rows = [
        [
            f"{r['omega']:g}",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['low']:,.0f} to {r['high']:,.0f}",
            f"{r['measured_tokens_per_s']:,.0f}",
            f"{r['measured_low']:,.0f}",
            _signed(r["measured_tokens_per_s"] / r["tokens_per_s"] - 1),
            "yes" if r["low"] <= r["measured_tokens_per_s"] <= r["high"] else "no",
            f"{r['probability_best']:.0%}",
        ]
        for r in curve
    ]
    columns = (
        "ω | predicted tokens/s | 90% of samples | measured, quickest run | slowest run | "
        "measured / predicted - 1 | within | how probably the best"
    )
    return [
        "## The curve over ω",
        "",
        "Eleven points that differ in ω alone. The band: all tasks of an op are off together by "
        "what the profile's repeated measurements differ, and each task by what tasks scatter "
        "within the measured runs.",
        "",
        *table(columns, rows),
    ]


def _slopes(slopes: Data | None) -> list[str]:
    head = ["## Delays", ""]
    if slopes is None:
        return [*head, "They have not been measured.", ""]
    rows = [
        [
            r["situation"],
            f"`{r['op']}`",
            r["lane"],
            str(r["tasks"]),
            _time(r["delay_s"]),
            f"{r['predicted_slope']:.2f}",
            f"{r['measured_slope']:.2f}",
            f"{r['se']:.2f}",
            "yes" if r["binds"] else "no",
            "yes" if r["agrees"] else "**no**",
            _signed(r["error"]) if r["binds"] and r["error"] is not None else "-",
        ]
        for r in judge.slope_rows(slopes)
    ]
    columns = (
        "situation | op | lane | tasks | delay of each | predicted slope | measured | "
        "standard error | binds | agree in sign | error where it binds"
    )
    return [
        *head,
        f"All tasks of an op are held back, op by op, of {slopes['layers']} layers of "
        f"{slopes['model']}, in situations in which other things bind:",
        "",
        *(_situation(s) for s in slopes["situations"]),
        "",
        "The slope is how many seconds a step is longer for each second of delay before every "
        "task; an op binds if it is predicted to be at least half its tasks. The standard error "
        "is from how repeated stretches of steps differ.",
        "",
        *table(columns, rows),
    ]


def _situation(of: Data) -> str:
    s = of["strategy"]
    weights = "all weights stay on the GPU" if of["kept"] else "all weights are copied"
    slots = f"{s['kv_slots']} slot{'s' * (s['kv_slots'] > 1)} for KV"
    return (
        f"- {of['name']}: {weights}; B = {s['B']:,}, b_a = {s['b_a']}, {slots}, "
        f"{of['context']:,} tokens of context, ω = {s['omega']:g}; delays of an op add "
        f"{of['share']:.0%} to a step, and twice that."
    )


def _failed(failed: list[Data]) -> list[str]:
    if not failed:
        return []
    lines = [f"- {x['model']} {x['point']}: a run hung or broke off" for x in failed]
    return ["## Points that failed", "", *lines, ""]


def _pct(x: float) -> str:
    return f"{x:.1%}"


def _signed(x: float) -> str:
    return f"{x:+.1%}".replace("-0.0%", "+0.0%")


def _time(seconds: float) -> str:
    return ms(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


if __name__ == "__main__":
    REPORT.write_text(report(), encoding="utf-8")
