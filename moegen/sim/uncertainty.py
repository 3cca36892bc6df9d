"""How sure a prediction is: many runs of a graph at once, each with durations that scatter."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import number, whole
from moegen.graph.features import FEATURES_OF
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel, checked_graph
from moegen.sim.engine import simulate
from moegen.sim.maxplus import Compiled
from moegen.sim.spread import Spread
from moegen.timeline import Timeline
from moegen.units import format_seconds

STEPS, SAMPLES, LEVEL = 5, 2000, 0.9
# Durations that are held at once: 64 MiB.
_AT_ONCE = 2**23


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The period of a step as it may turn out; see :func:`uncertainty`.

    Attributes
    ----------
    predicted_s : float
        Without scatter: that of ``simulate``.
    samples_s : ndarray, shape [samples]
        Periods with scatter.
    tokens : float
        New tokens of a step; 0 where the graph has no shape.
    spread : Spread
        How durations were taken to scatter.
    """

    predicted_s: float
    samples_s: np.ndarray = field(repr=False)
    tokens: float = 0.0
    spread: Spread = field(default_factory=Spread, repr=False)

    @property
    def mean_s(self) -> float:
        """Mean of the samples. Above ``predicted_s`` where lanes wait for the later of several."""
        return float(self.samples_s.mean())

    @property
    def std_s(self) -> float:
        """Standard deviation of the samples."""
        return float(self.samples_s.std(ddof=1)) if len(self.samples_s) > 1 else 0.0

    def quantile(self, share: float) -> float:
        """The period, in seconds, that this share of the samples does not exceed.

        Raises
        ------
        InvalidInput
            If ``share`` does not lie in [0, 1].
        """
        if not 0 <= number(share, "a share of samples", at_least=0) <= 1:
            raise InvalidInput(f"a share of samples lies in [0, 1], got {share!r}")
        return float(np.quantile(self.samples_s, share))

    def interval_s(self, level: float = LEVEL) -> tuple[float, float]:
        """Low and high period, in seconds, between which ``level`` of the samples lie.

        Raises
        ------
        InvalidInput
            If ``level`` does not lie in [0, 1].
        """
        if not 0 <= number(level, "level", at_least=0) <= 1:
            raise InvalidInput(f"level is a share of the samples and lies in [0, 1], got {level!r}")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def __repr__(self) -> str:
        if not self.spread.scatters:
            period = format_seconds(self.predicted_s)
            return f"<Uncertainty period {period}, no scatter is known: no band>"
        low, high = map(format_seconds, self.interval_s())
        return (
            f"<Uncertainty period {format_seconds(self.predicted_s)}, {LEVEL:.0%} of "
            f"{len(self.samples_s):,} samples between {low} and {high}>"
        )


def uncertainty(
    g: TaskGraph,
    cost: CostModel,
    spread: Spread | None = None,
    *,
    steps: int = STEPS,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Uncertainty:
    """The period of a step when durations scatter as they were measured to.

    The graph is simulated once, all resources shared; what each task then takes, company
    included, is multiplied by random factors, and the graph is run again for each sample
    (:class:`moegen.sim.maxplus.Compiled`). Each task of each step has a factor of its own, and
    all tasks of an op one in common, both log-normal with a mean of 1. Who is slowed by whom, and
    what handing tasks over takes, is not worked out anew: a copy that takes longer delays what
    waits for it, and not what shares the link with it. So an op for which there is slack gives no
    band, even where the link that it draws on binds. If a link may be off, say so of each op that
    draws on it.

    Parameters
    ----------
    g : TaskGraph
        One step, bound to a shape if the cost model goes by work.
    cost : CostModel
    spread : Spread, optional
        By default what the cost model itself knows, ``Spread.of_cost(cost, g)``. Where that is
        nothing, as of a roofline, the band has no width, and a ``UserWarning`` says so.
    steps : int
        Of a sample; the period is the mean over those in its middle.
    samples : int
    seed : int
        The same seed gives the same samples.

    Returns
    -------
    Uncertainty

    Raises
    ------
    InvalidInput
        If a number is out of range, or the spread names an op that neither the graph nor any
        graph of `build` has.
    GraphError
        If the graph is unrolled.
    """
    check(spread, [g])
    found = sampled(g, cost, spread, steps, samples, seed)
    warn_of_nothing(spread, [found])
    return found


def sampled(
    g: TaskGraph,
    cost: CostModel,
    spread: Spread | None,
    steps: int = STEPS,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Uncertainty:
    """:func:`uncertainty` of a spread that was checked, without a warning."""
    samples = whole(samples, "samples", at_least=1, at_most=2**24)
    seed = whole(seed, "seed")
    compiled = Compiled(g, steps)
    if spread is None:
        spread = Spread.of_cost(cost, g)
    run = simulate(g, cost, steps)
    lasts, idle = run.end_s - run.start_s, _idle_s(g, run)
    ops = list(dict.fromkeys(t.id.op for t in g))
    place = {op: i for i, op in enumerate(ops)}
    of = np.tile([place[t.id.op] for t in g], steps).astype(int)
    each = np.array([spread.each.get(op, 0.0) for op in ops])[of]
    # A stream of numbers for each op: candidates that are compared have them in common.
    common = np.column_stack(
        [
            _factors(spread.common.get(op, 0.0), _stream(seed, op).standard_normal(samples))
            for op in ops
        ]
    ).reshape(samples, len(ops))
    own = np.random.default_rng([seed, zlib.crc32(g.structure_hash.encode())])
    periods = np.empty(samples)
    block = max(1, _AT_ONCE // max(1, len(lasts)))
    for begin in range(0, samples, block):
        rows = slice(begin, min(begin + block, samples))
        durations = lasts * common[rows][:, of]
        scatter = np.flatnonzero((each > 0) & (lasts > 0))
        normal = own.standard_normal((len(durations), len(scatter)))
        durations[:, scatter] *= _factors(each[scatter], normal)
        periods[rows] = compiled.period(idle + durations)
    tokens = g.shape.tokens if g.shape is not None else 0
    return Uncertainty(run.period_s, periods, float(tokens), spread)


def check(spread: Any, graphs: Collection[TaskGraph]) -> None:
    """Refuse what is no graph, and a spread of an op that there is not, for it may be misspelt.

    Ops of other graphs pass: at ω = 0 there is no CPU attention, and runs know how it scatters.
    """
    for g in graphs:
        checked_graph(g)
    if spread is None:
        return
    if not isinstance(spread, Spread):
        raise InvalidInput(f"spread must be a Spread, got {spread!r}")
    there = dict.fromkeys(t.id.op for g in graphs for t in g)
    for op in (*spread.each, *spread.common):
        if op not in there and op not in FEATURES_OF:
            raise InvalidInput(
                f"the spread is of {op!r}, and there is no such op; there are {', '.join(there)}"
            )


def warn_of_nothing(spread: Spread | None, found: Iterable[Uncertainty]) -> None:
    """Tell who asked the caller where a cost model was relied on that knows no scatter."""
    if spread is None and not any(u.spread.scatters for u in found):
        warnings.warn(
            "the cost model does not know how durations scatter, so there is no band: give "
            "spread=Spread.of(runs), Spread(common={...}), or a cost model from a profile",
            stacklevel=3,
        )


def _idle_s(g: TaskGraph, run: Timeline) -> np.ndarray:
    """Seconds by which each task began later than all that it waits for had ended, shape [tasks].

    That is what handing tasks over takes, where the cost model knows it; else none.
    """
    n, structure = len(g), g.structure
    waits, idle = structure.with_lanes(), np.zeros(len(run.start_s))
    starts, ends = run.start_s.tolist(), run.end_s.tolist()
    for begin in range(0, len(starts), n):
        if begin == n:
            waits = structure.with_lanes(later=True)
        for v in range(n):
            ready = max((ends[begin + u] for u in waits[v]), default=0.0)
            idle[begin + v] = max(0.0, starts[begin + v] - ready)
    return idle


def _stream(seed: int, op: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(op.encode())])


def _factors(deviation: Any, normal: np.ndarray) -> np.ndarray:
    """Log-normal factors of mean 1 with a relative standard deviation."""
    variance = np.log1p(np.square(deviation))
    return np.exp(np.sqrt(variance) * normal - variance / 2)
