"""From ops timed one by one to the curves of a table."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression, nnls

from moegen.exec.host_code import Handed, HostCode
from moegen.exec.op_bench import Timed
from moegen.graph.curve import Curve
from moegen.graph.features import FEATURES, FEATURES_OF

# What the copy engine carries it carries alike in both phases. Computed is with other kernels in
# part, and at another clock: prefill has a GPU busy all the time, which kernels that use host
# memory wait for too, and which is hot still when the tokens are sampled. And a step of prompts is
# bound by tokens, one of decode by rows.
_BY_PHASE = frozenset(
    {
        "copy_rows", "embed", "pre_attn", "append_kv", "post_attn", "route", "copy_counts",
        "shared_expert", "dense_mlp", "expert", "combine", "lm_head", "sample",
    }
)  # fmt: skip
# Ops that follow their second feature too from one value to another: how long rows are. For the
# others it is the width of a model's matrices or rows, and each width has a curve of its own.
_TWO_WAYS = frozenset({"attn_cpu", "attn_gpu", "attn_prefill"})

# A line is drawn through what is so many times as long.
_APART = 2.0

_At = tuple[float, ...]


class _Value(NamedTuple):
    """A point of a curve, see `moegen.graph.curve.Curve`; NaN if it was not timed beside others."""

    seconds: float
    spread: float
    beside_copies_s: float
    crowded_s: float
    launches: float  # 1 where seconds are those of all


_Found = dict[_At, _Value]


def curves(timed: Iterable[Timed], handed: Iterable[Handed], source: str) -> list[Curve]:
    """Curves of everything that was timed; what was timed at one point twice counts as its mean.

    Parameters
    ----------
    timed : iterable of Timed
    handed : iterable of Handed
        What tasks took of the issuing thread; of an op those of the phases that it was timed in
        count, whether they were timed or not.
    source : str
        How it was measured.
    """
    by_op: dict[tuple[str, str | None], dict[_At, list[_Value]]] = defaultdict(
        lambda: defaultdict(list)
    )
    phases: dict[tuple[str, str | None], set[str | None]] = defaultdict(set)
    for t in timed:
        op, work = t.task.id.op, t.task.work
        assert work is not None
        at = tuple(float(FEATURES[name].of(work)) for name in FEATURES_OF[op])
        phase = t.task.id.phase if op in _BY_PHASE else None
        n = 1 if "launches" in FEATURES_OF[op] else work.launches
        # What it waits for beside others it waits for once, however many it launches.
        alone_s = t.seconds / n
        copies_s, crowded_s = (
            math.nan if s is None else alone_s + s - t.seconds
            for s in (t.beside_copies_s, t.crowded_s)
        )
        by_op[op, phase][at].append(_Value(alone_s, t.spread, copies_s, crowded_s, n))
        phases[op, phase].add(t.task.id.phase)
    hosts: dict[str, list[Handed]] = defaultdict(list)
    for h in handed:
        hosts[h.task.id.op].append(h)
    found = []
    for (op, phase), points in by_op.items():
        once_s = _once_s(points)
        means = {at: _mean(several, once_s or 0.0) for at, several in points.items()}
        host = HostCode(op, [h for h in hosts[op] if h.task.id.phase in phases[op, phase]])
        found += [_curve(op, phase, source, grid, once_s, host) for grid in _grids(op, means)]
    return found


def _once_s(points: Mapping[_At, Sequence[_Value]]) -> float | None:
    """What a task takes once, however many kernels it launches: by how much each of several is
    faster than one alone would be, which is between those that were timed, and no more than all
    that any task takes; None if nothing tells."""
    rows: dict[_At, dict[float, float]] = defaultdict(dict)
    for at, several in points.items():
        if ones := [v.seconds for v in several if v.launches == 1]:
            rows[at[1:]][at[0]] = float(np.mean(ones))
    found = []
    for (first, *rest), several in points.items():
        row = sorted(rows[tuple(rest)].items())
        if row and row[0][0] <= first <= row[-1][0]:
            firsts, seconds = zip(*row, strict=True)
            one_s = float(np.interp(first, firsts, seconds))
            found += [(one_s - v.seconds) / (1 - 1 / v.launches) for v in several if v.launches > 1]
    if not found:
        return None
    least_s = min(v.seconds * v.launches for several in points.values() for v in several)
    return min(max(0.0, float(np.median(found))), least_s)


def _mean(several: Sequence[_Value], once_s: float) -> _Value:
    """The mean of what was timed at one point, each as one kernel would be."""
    ones = []
    for v in several:
        hidden_s = once_s * (1 - 1 / v.launches)
        ones.append(
            v._replace(
                seconds=v.seconds + hidden_s,
                beside_copies_s=v.beside_copies_s + hidden_s,
                crowded_s=v.crowded_s + hidden_s,
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # none was timed beside others
        return _Value(*np.nanmean(ones, axis=0).tolist())


def _grids(op: str, points: Mapping[_At, _Value]) -> list[_Found]:
    """Points that are the whole of a grid, all together all of them; the largest grid first."""
    rows: dict[_At, _Found] = defaultdict(dict)
    for at, value in sorted(points.items()):
        rows[at[1:]][at] = value
    if op not in _TWO_WAYS:
        return list(rows.values())
    # Rows of a grid have the same first values, and differ in the second alone. What two of them
    # have in common is a grid too, however far each goes beyond: without it nothing would lie
    # between them.
    reach: dict[_At, dict[_At, frozenset[float]]] = defaultdict(dict)
    for rest, row in rows.items():
        reach[rest[1:]][rest] = frozenset(at[0] for at in row)
    grids = []
    for of in reach.values():
        for firsts in _in_common(of.values()):
            grid = [rest for rest, has in of.items() if firsts <= has]
            grids.append(
                {at: rows[rest][at] for rest in grid for at in rows[rest] if at[0] in firsts}
            )
    return sorted(grids, key=len, reverse=True)


def _in_common(sets: Iterable[frozenset[float]]) -> list[frozenset[float]]:
    """These sets, and what any of them have in common, if that is anything."""
    found: dict[frozenset[float], None] = {}
    for one in sets:
        found |= dict.fromkeys([one, *(one & other for other in found)])
    return [one for one in found if one]


def _curve(
    op: str, phase: Any, source: str, points: _Found, once_s: float | None, host: HostCode
) -> Curve:
    names = FEATURES_OF[op]
    axes = [sorted({at[i] for at in points}) for i in range(len(names))]
    shape = tuple(map(len, axes))
    values = np.empty((2 + len(_Value._fields), *shape))
    for at, value in points.items():
        place = tuple(axis.index(x) for axis, x in zip(axes, at, strict=True))
        kernels = at[names.index("launches")] if "launches" in names else 1.0
        of_host = host.issue_s(at[0], kernels), host.turn_s(at[0])
        values[(slice(None), *place)] = *of_host, *value
    issue_s, turn_s, seconds, spread, copies, crowded, _ = values
    rising = _rising(seconds)
    beside_copies = _filled(seconds, copies, rising)
    crowded = _filled(seconds, crowded, rising)
    return Curve(
        ops=(op,),
        axes={name: tuple(axis) for name, axis in zip(names, axes, strict=True)},
        seconds=tuple(rising.tolist()),
        source=source,
        phase=phase,
        spread=tuple(spread.tolist()),
        issue_s=tuple(issue_s.tolist()),
        turn_s=tuple(turn_s.tolist()),
        more_s=host.more_s,
        once_s=None if once_s is None else min(once_s, float(rising.min())),
        beside_copies=None if beside_copies is None else tuple(beside_copies.tolist()),
        crowded=None if crowded is None else tuple(crowded.tolist()),
    )


def _filled(alone: np.ndarray, beside: np.ndarray, least: np.ndarray) -> np.ndarray | None:
    """Seconds beside others at every point, none below ``least``; None if they were never seen.

    Where they were not, what a task waits for lies on a line over ``alone``, the nearest by least
    squares to those that were: a short one waits about as long as a long one, and what is longer
    alone waits no less. If all that was seen is about as long alone, noise would make up a slope:
    all wait as long.
    """
    seen = ~np.isnan(beside)
    if not seen.any():
        return None
    x, waits = alone[seen], beside[seen] - alone[seen]
    once_s, share = max(0.0, float(np.median(waits))), 0.0
    if x.max() >= _APART * x.min():
        once_s, share = nnls(np.stack([np.ones_like(x), x], axis=1), waits)[0].tolist()
    beside = np.where(seen, beside, alone + once_s + share * alone)
    return _rising(np.maximum(beside, least))


def _rising(values: np.ndarray) -> np.ndarray:
    """The nearest values, by least squares, that do not fall along the first axis: more takes no
    less, and noise turned them round."""
    return np.apply_along_axis(lambda row: isotonic_regression(row).x, 0, values)
