"""A measured run's graph built anew with other knobs, and what its steps would work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.build import build
from moegen.graph.checks import whole
from moegen.graph.shape import MOST_ROWS, Shape
from moegen.graph.strategy import Strategy
from moegen.graph.task import TaskGraph


def rebuilt(
    g: TaskGraph, shapes: Sequence[Shape], change: Callable[[Strategy], Strategy]
) -> tuple[TaskGraph, list[Shape]]:
    """``g`` with another strategy, row by row of the same lengths, and its steps' shapes.

    With another B the batch has as many rows: every so many-th of those there were, or each of
    them several times, in their order, so that lengths are spread as before. Tokens of experts
    grow or shrink in proportion.

    Parameters
    ----------
    g : TaskGraph
        One step, as `build` made it.
    shapes : sequence of Shape
        Of the steps; none where that of the graph holds for all.
    change : callable
        Gives the new strategy for the old one, whose B is the rows that there are.

    Raises
    ------
    InvalidInput
        If the graph is of no model, or is unrolled; if a knob says nothing of its phase or its
        model; what ``change`` raises.
    """
    if g.model is None or g.strategy is None or g.layout is None:
        raise InvalidInput(
            "the run's graph was made by hand, of no model: knobs cannot be changed in it, rates "
            "of the machine and durations of ops can"
        )
    of = g.shape or (shapes[0] if shapes else None)
    if g.n_steps != 1 or of is None:
        raise InvalidInput(
            f"the run's graph is unrolled to {g.n_steps} steps or has no shape: to change knobs, "
            f"run and save the graph of one step"
        )
    before = g.strategy.with_(B=g.layout.rows)
    s = change(before)
    _check_effect(g, before, s)
    slot_tokens = _slot_tokens(g, of)
    rows = _rows(of.rows, whole(s.B, "B", at_most=MOST_ROWS))
    of = _resized(of, rows, g)
    new = _build(g, s, of, slot_tokens)
    return new.bind(of), [_resized(shape, rows, g) for shape in shapes]


def _check_effect(g: TaskGraph, before: Strategy, s: Strategy) -> None:
    assert g.model is not None
    if g.phase == "prefill" and s.omega != before.omega:
        raise InvalidInput(
            f"omega is the CPU's share of decode attention and has no effect on a prefill run: ask "
            f"a decode run for {s.omega:g}"
        )
    most = max(layer.n_experts for layer in g.model.layers)
    if s.expert_group > max(most, before.expert_group):
        raise InvalidInput(
            f"expert_group is {s.expert_group}, and a layer of {g.model.name} has {most} experts: "
            f"at most {most} can be copied and computed as one"
        )


def _build(g: TaskGraph, s: Strategy, of: Shape, slot_tokens: int | None) -> TaskGraph:
    assert g.model is not None
    lengths = of.past if g.phase == "decode" else [max(1, n) for n in of.new]
    return build(g.model, s, g.phase, lengths=lengths, kv_slot_tokens=slot_tokens)


def _slot_tokens(g: TaskGraph, of: Shape) -> int | None:
    """Tokens that a KV slot holds, or a micro-batch of prefill may have, where that limits it."""
    assert g.strategy is not None and g.layout is not None
    if _build(g, g.strategy, of, None).layout == g.layout:
        return None
    each = of.new if g.phase == "prefill" else [n + 1 for n in of.past]
    return max(sum(each[i] for i in part) for part in g.layout.parts)


def _rows(there: int, wanted: int) -> np.ndarray:
    """Which of the rows there are stands at each place of the new batch."""
    if there == wanted:
        return np.arange(there)
    return ((np.arange(wanted) + 0.5) * there / wanted).astype(int)


def _resized(shape: Shape, rows: np.ndarray, g: TaskGraph) -> Shape:
    if len(rows) == shape.rows:
        return shape
    past, new = (np.array(x, dtype=int)[rows].tolist() for x in (shape.past, shape.new))
    resized = Shape(tuple(past), tuple(new))
    if shape.expert_tokens is None:
        return resized
    assert g.model is not None
    counts = {
        layer: _in_proportion(tokens, resized.tokens * g.model.layers[layer].top_k)
        for layer, tokens in shape.expert_tokens.items()
    }
    return replace(resized, expert_tokens=counts)


def _in_proportion(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """Whole numbers in the ratio of ``counts`` that sum to ``total``: largest remainders."""
    if not sum(counts):
        return tuple(counts)
    exact = np.array(counts, dtype=float) * total / sum(counts)
    least = np.floor(exact).astype(int)
    most_left = np.argsort(least - exact, kind="stable")[: total - int(least.sum())]
    least[most_left] += 1
    return tuple(least.tolist())
