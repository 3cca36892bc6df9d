"""Shape: the sizes of one step, apart from its structure.

Structure stays the same from step to step; what changes is how long each row's history
is, which rows are still alive, and how many tokens the router sent to each expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from moegen.errors import GraphError, InvalidInput
from moegen.graph.memory import residency
from moegen.graph.model import Layer, ModelSpec
from moegen.graph.task import NO_WORK, Layout, TaskGraph, TaskId


@dataclass(frozen=True)
class Shape:
    """Lengths of the batch's rows at one step, in batch order.

    Parameters
    ----------
    past : tuple of int, shape [rows]
        Tokens in the KV store before the step.
    new : tuple of int, shape [rows]
        Tokens the step adds: the prompt in prefill, 1 in decode, 0 for a row that ended.
    expert_tokens : mapping of int to tuple of int, optional
        Tokens each expert of a layer got. Layers left out are taken as evenly routed.
    """

    past: tuple[int, ...]
    new: tuple[int, ...]
    expert_tokens: Mapping[int, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "past", tuple(int(n) for n in self.past))
        object.__setattr__(self, "new", tuple(int(n) for n in self.new))
        if len(self.past) != len(self.new):
            raise InvalidInput(
                f"a shape needs as many histories as new lengths, got {len(self.past)} and "
                f"{len(self.new)}"
            )
        if any(n < 0 for n in (*self.past, *self.new)):
            raise InvalidInput("row lengths cannot be negative")

    @classmethod
    def uniform(cls, rows: int, past: int, new: int) -> Shape:
        """Every row alike."""
        return cls((past,) * rows, (new,) * rows)

    @property
    def rows(self) -> int:
        """Sequences in the batch, ended ones included."""
        return len(self.past)

    @cached_property
    def tokens(self) -> int:
        """New tokens of the step."""
        return sum(self.new)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; runs of equal rows are folded."""
        experts = self.expert_tokens
        return {
            "past": _fold(self.past),
            "new": _fold(self.new),
            "expert_tokens": None if experts is None else {str(k): list(v) for k, v in experts.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shape:
        """Inverse of ``to_dict``."""
        experts = data["expert_tokens"]
        return cls(
            tuple(_unfold(data["past"])),
            tuple(_unfold(data["new"])),
            None if experts is None else {int(k): tuple(v) for k, v in experts.items()},
        )


def _fold(values: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for v in values:
        if runs and runs[-1][0] == v:
            runs[-1][1] += 1
        else:
            runs.append([v, 1])
    return runs


def _unfold(runs: Sequence[Sequence[int]]) -> list[int]:
    return [v for v, n in runs for _ in range(n)]


@dataclass(frozen=True)
class Part:
    """The live rows of one share of the batch (all, the CPU's, a micro-batch's)."""

    past: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.new)

    @cached_property
    def tokens(self) -> int:
        return sum(self.new)

    @cached_property
    def history(self) -> int:
        return sum(self.past)


class Sizes:
    """What the work functions of `moegen.graph.ops` ask about a step.

    Parameters
    ----------
    g : TaskGraph
        A graph that `build` made.
    shape : Shape
        As many rows as the graph's layout.
    """

    def __init__(self, g: TaskGraph, shape: Shape) -> None:
        if g.model is None or g.layout is None or g.strategy is None:
            raise GraphError("a graph made by hand carries its own work: it cannot be bound")
        if shape.rows != g.layout.rows:
            raise GraphError(
                f"the graph was laid out for {g.layout.rows} rows and the shape has {shape.rows}: "
                f"build a graph for these rows"
            )
        self.model: ModelSpec = g.model
        self.layout: Layout = g.layout
        self.strategy = g.strategy
        self.phase = g.phase
        self.shape = shape
        self.residency = residency(g.model, g.strategy.s_params)
        self.all = self._part(range(shape.rows))
        self.cpu = self._part(g.layout.cpu)
        starts = [g.layout.cpu_rows, *g.layout.micro_batches]
        bounds = list(accumulate(starts))
        self.micro_batches = tuple(
            self._part(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)
        )
        self.gpu_rows = self._part(range(g.layout.cpu_rows, shape.rows))

    def _part(self, positions: range) -> Part:
        live = [p for p in positions if self.shape.new[p]]
        return Part(
            tuple(self.shape.past[p] for p in live), tuple(self.shape.new[p] for p in live)
        )

    def part(self, task_id: TaskId) -> Part:
        """The rows a task works on."""
        return self.micro_batches[task_id.microbatch] if task_id.microbatch >= 0 else self.all

    def layer(self, task_id: TaskId) -> Layer:
        """The layer a task belongs to."""
        return self.model.layers[task_id.layer]

    def expert_tokens(self, layer: int) -> Sequence[int]:
        """Tokens per expert: those given, or an even routing's whole numbers."""
        given = self.shape.expert_tokens
        if given is not None and layer in given:
            return given[layer]
        spec = self.model.layers[layer]
        total = self.all.tokens * spec.top_k
        active = self.active_experts(layer)
        base, extra = divmod(total, active) if active else (0, 0)
        counts = [base + (i < extra) for i in range(active)]
        return counts + [0] * (spec.n_experts - active)

    def active_experts(self, layer: int) -> int:
        """Experts expected to get a token when each token picks ``top_k`` at random."""
        spec = self.model.layers[layer]
        tokens = self.all.tokens
        if tokens == 0:
            return 0
        miss = (1 - spec.top_k / spec.n_experts) ** tokens
        expected = round(spec.n_experts * (1 - miss))
        return max(min(spec.top_k, spec.n_experts), min(expected, spec.n_experts))

    def ranked_experts(self, layer: int) -> list[int]:
        """Active experts in the order in which rank tasks take them."""
        return [e for e, n in enumerate(self.expert_tokens(layer)) if n]


def bind(g: TaskGraph, shape: Shape) -> TaskGraph:
    """``g`` with the work of ``shape`` in each task; the structure stays as it is."""
    from moegen.graph.ops import OPS

    if g.n_steps != 1:
        raise GraphError("bind a step before unrolling it")
    sizes = Sizes(g, shape)
    tasks = []
    for t in g.tasks:
        work = OPS[t.id.op].work(sizes, t.id)
        if not all(math.isfinite(x) and x >= 0 for x in (work.flops, work.gpu_bytes)):
            raise GraphError(f"{t.id} was given work that is negative or not finite: {work}")
        tasks.append(replace(t, work=work if work.launches else NO_WORK))
    return g.with_tasks(tasks, shape)
