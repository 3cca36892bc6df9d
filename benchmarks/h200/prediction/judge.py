"""How good the predictions are: figures from what was measured and predicted, no simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from moegen.causal_profiling import NONE, SURE
from moegen.sim.uncertainty import LEVEL

Data = dict[str, Any]
MEDIAN, WORST, OP_MEDIAN, SLOPE = 0.03, 0.06, 0.05, 0.20
# An op that takes less of a step is no reason for a wrong one.
LONG = 0.01
# A task that takes less is mostly its launch.
SHORT_S = 200e-6
# Of the errors of an op this share has one sign: it is biased.
ONE_SIDED = 0.8
# What is said of some points of several needs as many.
SOME = 3
# Without a trend a rank correlation scatters by 1 / sqrt(n - 1): so many times that is a trend.
_TREND = 2.5
# A band is too narrow from so many standard deviations fewer points in it than its level.
_SHORT = 2.0
# Of a step: KV that is fetched for longer has much to do with what it takes.
FETCHES = 0.5
HELD_OUT = ("decode-", "prefill-")
PLANNED = "planned"


def held_out(points: Iterable[Data]) -> list[Data]:
    """The points that were drawn at random; not the curve's, nor the planner's."""
    return [p for p in points if p["name"].startswith(HELD_OUT)]


def step_s(step_end_s: Sequence[float] | np.ndarray) -> float:
    """The time of a step: the median of those that count, from when each step ended."""
    return float(np.median(counted_s(step_end_s)))


def counted_s(step_end_s: Sequence[float] | np.ndarray) -> np.ndarray:
    """What each step took that counts, as `Timeline.counted_steps` has it."""
    each_s = np.diff(step_end_s)
    return each_s[:-1] if len(each_s) > 1 else each_s


@dataclass(frozen=True)
class Errors:
    """Of points' step times: ``n``, median and worst without sign, shares within 3% and 6%."""

    n: int
    median: float
    worst: float
    within_median: float
    within_worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """From errors with their sign; at least one."""
        size = np.abs(np.asarray(errors, dtype=float))
        median, worst = float(np.median(size)), float(size.max())
        return cls(
            len(size), median, worst, float((size <= MEDIAN).mean()), float((size <= WORST).mean())
        )


def errors(points: Iterable[Data]) -> Data | None:
    """Of the drawn points: ``step_median``, ``step_worst``, ``per_op``, and all ``errors`` by model
    and name; None if there are none."""
    drawn = held_out(points)
    if not drawn:
        return None
    each = {f"{p['model']} {p['name']}": p["error"] for p in drawn}
    e = Errors.of(list(each.values()))
    per_op = Errors.of([r["error"] for r in op_errors(drawn)]).median
    return {"step_median": e.median, "step_worst": e.worst, "per_op": per_op, "errors": each}


def op_errors(points: Iterable[Data]) -> list[Data]:
    """A row for each op of each point: ``op``, ``share`` of the step, ``error``, and so on."""
    rows = []
    for p in points:
        for op, of in p["ops"].items():
            if not of["measured_s"] > 0:
                continue
            rows.append(
                {
                    "op": op,
                    "lane": of["lane"],
                    "model": p["model"],
                    "phase": p["phase"],
                    "share": of["measured_s"] / p["measured_s"],
                    "error": of["predicted_s"] / of["measured_s"] - 1,
                    "task_s": of["measured_s"] / of["tasks"],
                    "late_s": (of["measured_s"] - of["predicted_s"]) / of["tasks"],
                    "spread": of["spread"],
                }
            )
    return rows


def by_op(points: Iterable[Data]) -> list[Data]:
    """By op, model and phase, the largest share of a step first.

    Returns
    -------
    list of dict
        ``op``, ``lane``, ``model``, ``phase``, ``points``, ``share`` of a step (median),
        ``task_s`` of one measured task (median), ``median`` of the errors without sign, ``signed``
        median, ``of_step``, the same as a share of the step, ``sign`` (1 or -1 where most errors
        are of one sign, else 0), ``spread`` of its time from run to run (median, or None),
        ``met``, and ``why`` where it is not.
    """
    of: dict[tuple[str, ...], list[Data]] = {}
    for row in op_errors(points):
        of.setdefault((row["op"], row["model"], row["phase"]), []).append(row)
    rows = []
    for (op, model, phase), some in of.items():
        errors = np.array([r["error"] for r in some])
        spreads = [r["spread"] for r in some if r["spread"] is not None]
        row = {
            "op": op,
            "lane": some[0]["lane"],
            "model": model,
            "phase": phase,
            "points": len(some),
            "share": float(np.median([r["share"] for r in some])),
            "task_s": float(np.median([r["task_s"] for r in some])),
            "median": float(np.median(np.abs(errors))),
            "signed": float(np.median(errors)),
            "of_step": float(np.median([r["error"] * r["share"] for r in some])),
            "sign": one_sided(errors),
            "spread": float(np.median(spreads)) if spreads else None,
        }
        row["met"] = row["median"] <= OP_MEDIAN
        rows.append(row | {"why": "" if row["met"] else _why(row, some)})
    return sorted(rows, key=lambda r: -r["share"])


def one_sided(errors: Iterable[float]) -> int:
    """1 if most errors are above 0, -1 if most are below, 0 if neither."""
    each = np.asarray(list(errors), dtype=float)
    for sign in (1, -1):
        if len(each) and (sign * each > 0).mean() >= ONE_SIDED:
            return sign
    return 0


def trend(x: Sequence[float], errors: Sequence[float]) -> float | None:
    """Spearman's rank correlation of errors with ``x``; None where it may well be chance."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(errors)) < 2:
        return None
    rho = float(pd.Series(list(x)).corr(pd.Series(list(errors)), method="spearman"))
    return rho if abs(rho) * np.sqrt(len(x) - 1) >= _TREND else None


def bias(curve: Sequence[Data]) -> int:
    """1 if most points of the curve are faster than predicted, -1 if slower; 0 if neither, or of
    few."""
    return one_sided(curve_errors(curve)) if len(curve) >= SOME else 0


def curve_errors(curve: Iterable[Data]) -> list[float]:
    """Measured over predicted throughput, less 1, of each point of the curve."""
    return [r["measured_tokens_per_s"] / r["tokens_per_s"] - 1 for r in curve]


def usual_miss(others: Data | None) -> float:
    """What steps were off in the other measurements, as a relative standard deviation.

    From the median of their median errors, as of a normal distribution about 0; 0 if there are
    none. None of them is the one that is judged.
    """
    each = [m["step_median"] for m in others["measurements"]] if others else []
    return float(np.median(each)) / NormalDist().inv_cdf(0.75) if each else 0.0


def band(row: Data, miss: float = 0.0) -> tuple[float, float]:
    """Between which tokens a second a point of the curve lies with the probability `LEVEL`.

    That is the band of predicted.json; with a ``miss`` of all durations by as much (a relative
    standard deviation) beside what it has, one about the same middle that is as much wider.
    """
    if not miss:
        return row["low"], row["high"]
    low, high = np.log(row["low"]), np.log(row["high"])
    reach = np.hypot((high - low) / 2, NormalDist().inv_cdf((1 + LEVEL) / 2) * miss)
    middle = (low + high) / 2
    return float(np.exp(middle - reach)), float(np.exp(middle + reach))


def fetch_share(p: Data) -> float:
    """The share of a measured step in which KV is fetched."""
    return p["ops"].get("fetch_kv", {"measured_s": 0.0})["measured_s"] / p["measured_s"]


def is_inside(row: Data, miss: float = 0.0) -> bool:
    """Whether a point of the curve was measured within its :func:`band`."""
    low, high = band(row, miss)
    return low <= row["measured_tokens_per_s"] <= high


@dataclass(frozen=True)
class Coverage:
    """How many points of the curve lie in their band.

    Attributes
    ----------
    n, inside : int
    expected : int
        As many as the band's level says.
    short : bool
        Whether fewer lie inside by more than two standard deviations, if points fell in or out
        each by itself. What tasks of an op have in common makes them fall together, so it may be
        chance all the same.
    """

    n: int
    inside: int
    expected: int
    short: bool

    @classmethod
    def of(cls, curve: Sequence[Data], miss: float = 0.0) -> Coverage:
        """Of the curve of predicted.json; of a :func:`band` with a ``miss`` beside."""
        n = len(curve)
        inside = sum(is_inside(r, miss) for r in curve)
        scatter = np.sqrt(n * LEVEL * (1 - LEVEL))
        short = inside < n * LEVEL - _SHORT * scatter
        return cls(n, inside, round(n * LEVEL), bool(short))


def _why(row: Data, some: Sequence[Data]) -> str:
    """What the data show about an op that misses."""
    said = []
    if row["spread"] is not None and row["spread"] >= row["median"]:
        said.append(f"differs by {row['spread']:.0%} from run to run itself")
    if row["task_s"] < SHORT_S:
        late_s = float(np.median([r["late_s"] for r in some]))
        word = "longer" if late_s > 0 else "less"
        said.append(
            f"a task takes {row['task_s'] * 1e6:.0f} µs, {abs(late_s) * 1e6:.0f} µs {word} than "
            f"predicted"
        )
    if row["sign"]:
        word = "slow" if row["sign"] > 0 else "fast"
        count = sum(row["sign"] * r["error"] > 0 for r in some)
        said.append(f"predicted too {word} in {count} of {len(some)} points")
    else:
        slow = sum(r["error"] > 0 for r in some)
        said.append(f"predicted too slow in {slow} of {len(some)} points, too fast in the others")
    return "; ".join(said)


def part_sum_error(points: Iterable[Data]) -> float:
    """By how much parts miss the error they are parts of, of the step: the worst point."""
    return max(
        abs(sum(p["parts"].values()) - p["period_error_s"]) / p["measured_period_s"] for p in points
    )


@dataclass(frozen=True)
class Ranking:
    """Kendall's tau over pairs that the noise cannot turn round.

    Attributes
    ----------
    tau : float
        (pairs in the predicted order - pairs in the other) / pairs; NaN without pairs.
    pairs, left_out : int
        Those that count, and those that are too close.
    """

    tau: float
    pairs: int
    left_out: int


def ranking(points: Sequence[Data], key: str) -> Ranking:
    """How well predictions order points of one model and phase.

    Parameters
    ----------
    points : sequence of dict
    key : {"step", "tokens"}
        Ordered by the time of a step, or by tokens a second.
    """
    known = [p["spread"] for p in points if p["spread"] is not None]
    usual = float(np.median(known)) if known else 0.0
    pairs = left_out = sum_of_signs = 0
    for a, b in combinations(points, 2):
        if (a["model"], a["phase"]) != (b["model"], b["phase"]):
            continue
        apart = np.log(_value(a, key, "measured_s") / _value(b, key, "measured_s"))
        noise = max(usual if p["spread"] is None else p["spread"] for p in (a, b))
        if abs(apart) <= np.log1p(2 * noise):
            left_out += 1
            continue
        told = np.log(_value(a, key, "predicted_s") / _value(b, key, "predicted_s"))
        pairs += 1
        sum_of_signs += int(np.sign(told * apart))
    return Ranking(sum_of_signs / pairs if pairs else float("nan"), pairs, left_out)


def _value(p: Data, key: str, side: str) -> float:
    return p[side] if key == "step" else p["tokens"] / p[side]


def regrets(points: Sequence[Data], curve: Sequence[Data]) -> list[Data]:
    """What a choice by prediction loses against the best that was measured.

    Returns
    -------
    list of dict
        ``what``, ``chosen``, ``best`` and ``regret`` (the share of tokens a second that is lost).
        Of the ω that is predicted best against the curve's best; of the planner's pick against
        the best of curve and itself.
    """
    if not curve:
        return []
    rate = {f"ω = {row['omega']:g}": row["measured_tokens_per_s"] for row in curve}
    pick = max(curve, key=lambda row: row["tokens_per_s"])
    rows = [("ω of the curve by prediction", f"ω = {pick['omega']:g}", dict(rate))]
    for p in points:
        if p["name"] == PLANNED:
            s = p["strategy"]
            name = f"B = {s['B']:,}, b_a = {s['b_a']}, ω = {s['omega']:g}"
            rows.append(("the planner's", name, rate | {name: p["tokens"] / p["measured_s"]}))
    found = []
    for what, chosen, rates in rows:
        best = max(rates, key=rates.__getitem__)
        lost = 1 - rates[chosen] / rates[best]
        found.append({"what": what, "chosen": chosen, "best": best, "regret": lost})
    return found


def slope_rows(slopes: Data) -> list[Data]:
    """The rows that `moegen.causal` gave of every situation, with three things more.

    Returns
    -------
    list of dict
        As of `moegen.causal`, with ``situation``, its :func:`title`; ``predicted``, ``measured``
        and ``within`` (two standard errors) as shares of the delay, which are slopes by task; and
        ``told``, whether the measurement itself says if there is an effect, and of which sign.
    """
    rows = []
    for s in slopes["situations"]:
        for row in s["slopes"]:
            n = row["tasks"]
            measured, within = row["measured_slope"] / n, SURE * row["se"] / n
            more = {
                "situation": title(s),
                "predicted": row["predicted_slope"] / n,
                "measured": measured,
                "within": within,
                "told": _side(measured - within) == _side(measured + within),
                # What is known well may lie where a slope begins to count.
                "edge": within <= NONE and abs(abs(measured) - NONE) <= within,
            }
            rows.append(row | more)
    return rows


def title(situation: Data) -> str:
    """Where the weights are, and who does the attention."""
    omega = situation["strategy"]["omega"]
    who = {0: "the GPU", 1: "the CPU"}.get(omega, "both")
    weights = "weights stay on the GPU" if situation["kept"] else "weights are copied"
    return f"{weights}, attention on {who}"


def _side(share: float) -> int:
    """The sign of a slope, or 0 for one so small that it counts as none."""
    return 0 if abs(share) <= NONE else int(np.sign(share))


@dataclass(frozen=True)
class Slopes:
    """Of injected delays: classes, agreeing in sign, not to be told, binding, within 20% of those.

    A class counts in each situation. One that agrees only because its standard error spans
    several signs is not to be told; unless it is known well, and lies on the ``edge`` of what
    counts as none.
    """

    classes: int
    agree: int
    edge: int
    untold: int
    binding: int
    close: int

    @classmethod
    def of(cls, rows: Sequence[Data]) -> Slopes:
        """From the rows of :func:`slope_rows`."""
        agree = [r for r in rows if r["agrees"]]
        edge = sum(not r["told"] and r["edge"] for r in agree)
        untold = sum(not r["told"] and not r["edge"] for r in agree)
        binding = [r for r in rows if r["binds"]]
        near = sum(is_close(r) for r in binding)
        return cls(len(rows), len(agree) - untold - edge, edge, untold, len(binding), near)


def is_close(row: Data) -> bool:
    """Whether a measured slope is as predicted, to a fifth."""
    return row["error"] is not None and abs(row["error"]) <= SLOPE
