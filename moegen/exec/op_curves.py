"""From ops timed one by one to the curves of a table."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from moegen.exec.op_bench import Timed
from moegen.graph.curve import Curve
from moegen.graph.features import FEATURES, FEATURES_OF

# What the copy engine carries it carries alike in both phases. Computed is with other kernels in
# part, and at another clock: prefill has a GPU busy all the time, which kernels that use host
# memory wait for too. And a step of prompts is bound by tokens, one of decode by rows.
_BY_PHASE = frozenset(
    {
        "copy_rows", "embed", "pre_attn", "append_kv", "post_attn", "route", "copy_counts",
        "shared_expert", "dense_mlp", "expert", "combine",
    }
)  # fmt: skip
# Ops that follow their second feature too from one value to another: how long rows are. For the
# others it is the width of a model's matrices, and each width has a curve of its own.
_TWO_WAYS = frozenset({"attn_cpu", "attn_gpu", "attn_prefill"})
# Copies of weights, and whose turn it is once a step is known.
_COPIES = frozenset({"copy_dense", "copy_expert"})
_BINDS = frozenset({"copy_rows"})

_At = tuple[float, ...]


class _Value(NamedTuple):
    """A point of a curve, see `moegen.graph.curve.Curve`; NaN if it was not timed crowded."""

    seconds: float
    spread: float
    issue_s: float
    turn_s: float
    crowded_s: float
    launches: float  # issue_s is of all of them


_Found = dict[_At, _Value]


def curves(timed: Iterable[Timed], source: str) -> list[Curve]:
    """Curves of everything that was timed; what was timed at one point twice counts as its mean.

    Parameters
    ----------
    timed : iterable of Timed
    source : str
        How it was measured.
    """
    by_op: dict[tuple[str, str | None], dict[_At, list[_Value]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for t in timed:
        op, work = t.task.id.op, t.task.work
        assert work is not None
        at = tuple(float(FEATURES[name].of(work)) for name in FEATURES_OF[op])
        phase = t.task.id.phase if op in _BY_PHASE else None
        n = 1 if "launches" in FEATURES_OF[op] else work.launches
        # What it waits for in a crowd it waits for once, however many it launches.
        wait_s = math.nan if t.crowded_s is None else t.crowded_s - t.seconds
        by_op[op, phase][at].append(
            _Value(t.seconds / n, t.spread, t.issue_s, t.turn_s, t.seconds / n + wait_s, n)
        )
    found = []
    for (op, phase), points in by_op.items():
        once_s = _once_s(points)
        means = {at: _mean(several, once_s or 0.0) for at, several in points.items()}
        found += [_curve(op, phase, source, grid, once_s) for grid in _grids(op, means)]
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
        ones.append(v._replace(seconds=v.seconds + hidden_s, crowded_s=v.crowded_s + hidden_s))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # none was timed crowded
        return _Value(*np.nanmean(ones, axis=0).tolist())


def _grids(op: str, points: Mapping[_At, _Value]) -> list[_Found]:
    """Points that are the whole of a grid, all together all of them."""
    rows: dict[_At, _Found] = defaultdict(dict)
    for at, value in sorted(points.items()):
        rows[at[1:]][at] = value
    if op not in _TWO_WAYS:
        return list(rows.values())
    # Rows of a grid have the same first values, and differ in the second alone. Those that go
    # farther are in two grids: one as far as they go, and one as far as others do.
    reach = {rest: tuple(at[0] for at in row) for rest, row in rows.items()}
    grids = []
    for kind, firsts in dict.fromkeys((rest[1:], first) for rest, first in reach.items()):
        of = [rest for rest in rows if rest[1:] == kind and set(firsts) <= set(reach[rest])]
        grids.append({at: rows[rest][at] for rest in of for at in rows[rest] if at[0] in firsts})
    return grids


def _curve(op: str, phase: Any, source: str, points: _Found, once_s: float | None) -> Curve:
    names = FEATURES_OF[op]
    axes = [sorted({at[i] for at in points}) for i in range(len(names))]
    shape = tuple(map(len, axes))
    values = np.empty((len(_Value._fields), *shape))
    for at, value in points.items():
        place = tuple(axis.index(x) for axis, x in zip(axes, at, strict=True))
        values[(slice(None), *place)] = value
    seconds, spread, issue_s, turn_s, crowded, launches = values
    issue_s, more_s = _issued_s(op, issue_s, launches)
    seconds, crowded = _filled(seconds, crowded)
    return Curve(
        ops=(op,),
        axes={name: tuple(axis) for name, axis in zip(names, axes, strict=True)},
        seconds=tuple(seconds.tolist()),
        source=source,
        phase=phase,
        spread=tuple(spread.tolist()),
        issue_s=tuple(issue_s.tolist()),
        turn_s=tuple(_turn_s(op, turn_s).tolist()),
        more_s=more_s,
        once_s=None if once_s is None else min(once_s, float(seconds.min())),
        crowded=None if crowded is None else tuple(crowded.tolist()),
    )


def _filled(seconds: np.ndarray, crowded: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Seconds that do not fall along the first axis, as more takes no less and noise turned them
    round, and those of every point in a crowd, None if that was never seen: where it was not, the
    median ratio of the points where it was."""
    ratio = crowded / seconds
    seconds = _rising(seconds)
    if np.isnan(ratio).all():
        return seconds, None
    ratio = np.where(np.isnan(ratio), np.nanmedian(ratio), ratio)
    return seconds, _rising(seconds * np.maximum(ratio, 1.0))


def _rising(values: np.ndarray) -> np.ndarray:
    """The nearest values, by least squares, that do not fall along the first axis."""
    return np.apply_along_axis(lambda row: isotonic_regression(row).x, 0, values)


def _issued_s(
    op: str, issue_s: np.ndarray, launches: np.ndarray
) -> tuple[np.ndarray, float | None]:
    """What handing the first kernel of a task over takes at every point, and each further one;
    None if nothing tells, and each takes as long.

    It is the same work whatever a kernel works on, and takes a third more or less from run to
    run: so all points tell it together. A copy of weights that waits for room in the driver's
    queue takes longer, so of these the quickest point does.
    """
    timed = issue_s > 0
    if not timed.any():  # no step has such a copy
        return issue_s, None
    if op in _BINDS:
        return _by_size(issue_s), None
    if op in _COPIES:
        of_one = timed & (launches == 1)
        of = of_one if of_one.any() else timed
        return np.full(issue_s.shape, (issue_s / launches)[of].min()), None
    one, several = timed & (launches == 1), timed & (launches > 1)
    if not one.any() or not several.any():
        return np.full(issue_s.shape, np.median((issue_s / launches)[timed])), None
    first_s = np.median(issue_s[one])
    more_s = np.median((issue_s[several] - first_s) / (launches[several] - 1))
    return np.full(issue_s.shape, first_s), max(0.0, float(more_s))


def _turn_s(op: str, turn_s: np.ndarray) -> np.ndarray:
    """What comes before that at every point; all of them tell it together too."""
    timed = turn_s > 0
    if not timed.any():
        return turn_s
    return _by_size(turn_s) if op in _BINDS else np.full(turn_s.shape, np.median(turn_s[timed]))


def _by_size(host_s: np.ndarray) -> np.ndarray:
    """What binds a step takes longer the more rows it has; the median where it was not timed."""
    timed = host_s > 0
    return np.where(timed, host_s, np.median(host_s[timed]))
