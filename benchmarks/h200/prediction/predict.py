"""What the profile predicts for every point that was measured, beside what it took.

    python benchmarks/h200/prediction/predict.py [RESULTS]

Reads the results folder, writes its predicted.json; the first time first.json, too, which stays.
Nothing is fitted to these runs: what goes into a prediction is profile.json, and the lengths and
the routing of the run. Of the simulator a few constants are of no machine's profile: how long a
rest of the issuing thread is felt, and how far ahead it hands over (`moegen.graph.latencies` and
`moegen.graph.ahead`); they were found on other H200s, before.

The time of a step is the median of the steps that count (all but the first and the last), of the
predicted run as of the measured one. The machine is shared with others, whose work makes some runs
slower and none faster: so what was measured is the median of the quickest run of a point, and the
others say how far runs are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from judge import counted_s, step_s
from kept import RESULTS, Data, Kept, leaving, of_this_script

import moegen as mg
from moegen.sim.uncertainty import LEVEL, SAMPLES

CURVE = "omega-"


def main(argv: Sequence[str] | None = None) -> None:
    p = of_this_script(__doc__)
    p.add_argument("results", type=Path, nargs="?", default=RESULTS)
    kept = Kept(p.parse_args(argv).results)
    kept.write(predict(kept, say=print))


def predict(kept: Kept, say: Callable[[str], object] = lambda _: None) -> Data:
    """All points, and the curve over ω.

    Returns
    -------
    dict
        ``points`` as of :func:`point`; ``curve`` as of :func:`curve`, empty if it was not measured.

    Raises
    ------
    InvalidInput
        If nothing was measured, or a file of the results is missing or damaged.
    """
    kept.require()
    points, on_curve = [], {}
    for runs in kept.points():
        found = point(kept, runs)
        points.append(found)
        say(f"{found['model']} {found['name']}: {found['error']:+.2%}")
        if found["name"].startswith(CURVE):
            on_curve[found["strategy"]["omega"]] = found, runs
    return {"points": points, "curve": curve(kept, on_curve)}


def quickest(runs: Sequence[Data]) -> Data:
    """The run whose steps are the shortest."""
    return min(runs, key=lambda run: step_s(run["step_end_s"]))


def point(kept: Kept, runs: Sequence[Data]) -> Data:
    """A point: measured, predicted, and the parts of the error.

    Returns
    -------
    dict
        ``measured_s`` and ``predicted_s`` of a step and their ``error``; ``spread``, from the
        quickest run to the slowest, relative (None of one run); ``all_runs_s``, the median of
        the steps of all runs, and ``all_runs_error``; ``tokens`` of a step; ``parts`` of the
        error of the mean step, ``period_error_s``, in seconds, of ``measured_period_s``; ``ops``:
        ``lane``, ``tasks``, ``predicted_s``, ``measured_s`` of all of an op's tasks of a step,
        and their ``spread`` from run to run.
    """
    best = quickest(runs)
    real = kept.timeline(best)
    c = mg.compare(kept.cost, real)
    each_s = [step_s(run["step_end_s"]) for run in runs]
    all_runs_s = float(np.median(np.concatenate([counted_s(run["step_end_s"]) for run in runs])))
    predicted_s = step_s(c.predicted.step_end_s)
    took = {run["run"]: _op_seconds(kept.timeline(run).to_dict()) for run in runs}
    expected = _op_seconds(c.predicted.to_dict())
    lanes, tasks = c.by_op["lane"].to_dict(), c.by_op["tasks"].to_dict()
    shapes = real.shapes or ([real.graph.shape] if real.graph.shape is not None else [])
    lengths = [n for n, times in best["lengths"] for _ in range(times)]
    return {
        "model": best["model"],
        "layers": best["layers"],
        "name": best["name"],
        "phase": best["phase"],
        "strategy": best["strategy"],
        "expert_slots": _expert_slots(real),
        "tokens": float(np.mean([shape.tokens for shape in shapes])),
        "lengths": [min(lengths), max(lengths)],
        "run": best["run"],
        "predicted_s": predicted_s,
        "measured_s": min(each_s),
        "error": predicted_s / min(each_s) - 1,
        "runs_s": each_s,
        "spread": max(each_s) / min(each_s) - 1 if len(each_s) > 1 else None,
        "all_runs_s": all_runs_s,
        "all_runs_error": predicted_s / all_runs_s - 1,
        "measured_period_s": c.measured_period_s,
        "period_error_s": c.error_s,
        "parts": {str(part): float(s) for part, s in c.parts["seconds"].to_dict().items()},
        "ops": {
            op: {
                "lane": lanes[op],
                "tasks": int(tasks[op]),
                "predicted_s": expected[op],
                "measured_s": took[best["run"]][op],
                "spread": _spread([of[op] for of in took.values()]),
            }
            for op in expected
        },
    }


def curve(kept: Kept, points: Mapping[float, tuple[Data, Sequence[Data]]]) -> list[Data]:
    """The curve over ω: predicted tokens a second in their band, and measured.

    How far all tasks of an op may be off together is what the profile says of its repeated
    measurements; how single tasks scatter is taken from the measured runs.

    Returns
    -------
    list of dict
        By ω: ``omega``, ``period_s`` and ``tokens_per_s`` as predicted, ``low`` and ``high``
        between which 90% of the samples lie, ``probability_best``, and measured
        ``measured_tokens_per_s`` of the quickest run, ``measured_low`` of the slowest.
    """
    if not points:
        return []
    real = {w: kept.timeline(quickest(runs)) for w, (_, runs) in points.items()}
    again = [kept.timeline(r) for _, runs in points.values() for r in runs if r != quickest(runs)]
    scatter = mg.Spread.of([*real.values(), *again]).each
    rows, samples = [], []
    for w in sorted(points):
        p, runs = points[w]
        g = real[w].graph
        shapes = real[w].shapes
        if shapes:
            g = g.bind(shapes[len(shapes) // 2])
        spread = mg.Spread(scatter, mg.Spread.of_cost(kept.cost, g).common)
        u = mg.uncertainty(g, kept.cost, spread, samples=SAMPLES)
        # About the predicted step, which the first steps, on their way to it, are not part of.
        rates = p["tokens"] / p["predicted_s"] * u.predicted_s / u.samples_s
        low, high = np.quantile(rates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        samples.append(rates)
        rows.append(
            {
                "omega": w,
                "period_s": p["predicted_s"],
                "tokens_per_s": p["tokens"] / p["predicted_s"],
                "low": float(low),
                "high": float(high),
                "measured_tokens_per_s": p["tokens"] / p["measured_s"],
                "measured_low": p["tokens"] / max(p["runs_s"]),
            }
        )
    each = np.array(samples)
    best = (each == each.max(axis=0)) / (each == each.max(axis=0)).sum(axis=0)
    for row, share in zip(rows, best.mean(axis=1).tolist(), strict=True):
        row["probability_best"] = share
    return rows


def _expert_slots(timeline: mg.Timeline) -> int:
    s, model = timeline.graph.strategy, timeline.graph.model
    assert s is not None and model is not None
    return int(s.s_expert // model.expert_bytes)


def _op_seconds(timeline: Data) -> dict[str, float]:
    """Seconds of an op's tasks of a step: of each task the median over the steps that count."""
    ids = timeline["ids"]
    steps = sorted({i[2] for i in ids})
    counted = set(steps[1:-1] or steps[-1:])
    lasted: dict[tuple[Any, ...], list[float]] = {}
    for i, start_s, end_s in zip(ids, timeline["start_s"], timeline["end_s"], strict=True):
        if i[2] in counted:
            lasted.setdefault((*i[:2], *i[3:]), []).append(end_s - start_s)
    seconds: dict[str, float] = {}
    for key, each in lasted.items():
        seconds[key[0]] = seconds.get(key[0], 0.0) + float(np.median(each))
    return seconds


def _spread(values: Sequence[float]) -> float | None:
    least = min(values)
    return max(values) / least - 1 if len(values) > 1 and least > 0 else None


if __name__ == "__main__":
    leaving(main)
