"""Candidates against each other: bands of a curve, and how probably each is the best."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel
from moegen.sim.spread import Spread
from moegen.sim.uncertainty import (
    LEVEL,
    Uncertainty,
    check,
    sampled,
    warn_of_nothing,
)

if TYPE_CHECKING:
    import pandas as pd


def best_probability(
    graphs: Mapping[Any, TaskGraph], cost: CostModel, spread: Spread | None = None, **options: Any
) -> dict[Any, float]:
    """The probability that each candidate gives the most tokens a second.

    What all tasks of an op have in common is the same for all candidates within a sample: a link
    that is slower than measured is so for each of them.

    Parameters
    ----------
    graphs : mapping
        The graph of a step by candidate: ``{omega: mg.build(...), ...}``. Those without a
        shape count as of one token each.
    cost, spread, **options
        As for :func:`uncertainty`.

    Returns
    -------
    dict
        Probabilities by candidate, which sum to 1; ties are shared. Without any spread the best
        is taken as certain.

    Raises
    ------
    InvalidInput
        If there is no candidate; as :func:`uncertainty`.
    """
    found = _candidates(graphs, cost, spread, options)
    warn_of_nothing(spread, found.values())
    return _best(found)


def bands(
    graphs: Mapping[Any, TaskGraph],
    cost: CostModel,
    spread: Spread | None = None,
    *,
    name: str = "omega",
    level: float = LEVEL,
    **options: Any,
) -> pd.DataFrame:
    """A curve over candidates with its uncertainty; :func:`moegen.plot.bands` draws it.

    Parameters
    ----------
    graphs : mapping
        The graph of a step by candidate: ``{omega: mg.build(...), ...}``.
    cost, spread, **options
        As for :func:`uncertainty`.
    name : str
        Of the column of candidates.
    level : float
        Share of the samples between ``low`` and ``high``.

    Returns
    -------
    DataFrame
        One row a candidate: ``name``, ``period_s``, ``tokens_per_s`` as predicted, ``low`` and
        ``high`` of it, and ``probability_best``. ``low`` and ``high`` are the same where what
        scatters has slack: see :func:`uncertainty`.

    Raises
    ------
    InvalidInput
        As :func:`best_probability`.
    """
    import pandas as pd

    columns = [name, "period_s", "tokens_per_s", "low", "high", "probability_best"]
    if name in columns[1:]:
        raise InvalidInput(f"name {name!r} is that of another column: choose another one")
    found = _candidates(graphs, cost, spread, options)
    warn_of_nothing(spread, found.values())
    probability = _best(found)
    rows = []
    for candidate, u in found.items():
        tokens = u.tokens or 1.0
        slow_s, fast_s = reversed(u.interval_s(level))
        rates = [tokens / s if s else np.inf for s in (u.predicted_s, slow_s, fast_s)]
        rows.append((candidate, u.predicted_s, *rates, probability[candidate]))
    return pd.DataFrame(rows, columns=columns)


def _candidates(
    graphs: Mapping[Any, TaskGraph], cost: CostModel, spread: Spread | None, options: Any
) -> dict[Hashable, Uncertainty]:
    if not isinstance(graphs, Mapping) or not graphs:
        raise InvalidInput(
            f"graphs must map candidates to graphs, such as {{0.5: mg.build(...)}}, got {graphs!r}"
        )
    check(spread, graphs.values())
    return {k: sampled(g, cost, spread, **options) for k, g in graphs.items()}


def _best(found: Mapping[Hashable, Uncertainty]) -> dict[Any, float]:
    # Seconds a token: also of a step that takes none.
    each = np.array([u.samples_s / (u.tokens or 1.0) for u in found.values()])
    first = each == each.min(axis=0)
    shares = (first / first.sum(axis=0)).mean(axis=1)
    return dict(zip(found, shares.tolist(), strict=True))
