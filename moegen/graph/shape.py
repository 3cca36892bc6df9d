"""Shape: the sizes of one step, apart from its structure.

Structure stays the same from step to step; what changes is how long each row's history
is, which rows are still alive, and how many tokens the router sent to each expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moegen.errors import GraphError, InvalidInput
from moegen.graph.memory import residency
from moegen.graph.model import Layer, ModelSpec, Phase
from moegen.graph.task import NO_WORK, Layout, Task, TaskGraph, TaskId, Work


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
        if min(self.past, default=0) < 0 or min(self.new, default=0) < 0:
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
            "expert_tokens": None
            if experts is None
            else {str(k): list(v) for k, v in experts.items()},
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


@dataclass(frozen=True, eq=False)
class Part:
    """The live rows of one share of the batch (all, the CPU's, a micro-batch's).

    ``past`` and ``new`` are int64, shape [rows].
    """

    past: np.ndarray
    new: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.new)

    @cached_property
    def tokens(self) -> int:
        return int(self.new.sum())

    @property
    def contexts(self) -> np.ndarray:
        """Decode: tokens up to each row's new one, itself included; shape [rows]."""
        return self.past + 1


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
        self.phase: Phase = g.phase
        self.shape = shape
        self.residency = residency(g.model, g.strategy.s_params)
        self._past = np.array(shape.past, dtype=np.int64)
        self._new = np.array(shape.new, dtype=np.int64)
        self.all = self._part(range(shape.rows))
        self.cpu = self._part(g.layout.cpu)
        self.micro_batches = tuple(self._part(p) for p in g.layout.parts)
        self.gpu_rows = self._part(range(g.layout.cpu_rows, shape.rows))
        self._expert_tokens: dict[int, Sequence[int]] = {}
        self._ranked: dict[int, list[int]] = {}

    def _part(self, positions: range) -> Part:
        past = self._past[positions.start : positions.stop]
        new = self._new[positions.start : positions.stop]
        return Part(past[new > 0], new[new > 0])

    def part(self, task_id: TaskId) -> Part:
        """The rows a task works on."""
        return self.micro_batches[task_id.microbatch] if task_id.microbatch >= 0 else self.all

    def layer(self, task_id: TaskId) -> Layer:
        """The layer a task belongs to."""
        return self.model.layers[task_id.layer]

    def expert_tokens(self, layer: int) -> Sequence[int]:
        """Tokens per expert: those given, or an even routing's whole numbers."""
        if layer not in self._expert_tokens:
            self._expert_tokens[layer] = self._count_tokens(layer)
        return self._expert_tokens[layer]

    def _count_tokens(self, layer: int) -> Sequence[int]:
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
        if layer not in self._ranked:
            self._ranked[layer] = [e for e, n in enumerate(self.expert_tokens(layer)) if n]
        return self._ranked[layer]


def bind(g: TaskGraph, shape: Shape) -> TaskGraph:
    """``g`` with the work of ``shape`` in each task; the structure stays as it is."""
    if g.n_steps != 1:
        raise GraphError("bind a step before unrolling it")
    sizes = Sizes(g, shape)
    # Layers of a class are one object, and what is the same for them is worked out once:
    # all but the tasks of experts, whose tokens and residency are each layer's own.
    shared: dict[tuple[str, int, int], Work] = {}
    tasks = []
    for t in g.tasks:
        op, _, _, layer, microbatch, expert = t.id
        if expert >= 0:
            work = _work(sizes, t)
        else:
            key = (op, id(sizes.model.layers[layer]), microbatch)
            work = shared.get(key)
            if work is None:
                work = shared[key] = _work(sizes, t)
        tasks.append(Task(t.id, t.lane, t.reads, t.writes, work))
    return g.with_tasks(tasks, shape)


def _work(sizes: Sizes, t: Task) -> Work:
    from moegen.graph.ops import OPS

    work = OPS[t.id.op].work(sizes, t.id)
    if not (0 <= work.flops < math.inf and 0 <= work.gpu_bytes < math.inf):
        raise GraphError(f"{t.id} was given work that is negative or not finite: {work}")
    return work if work.launches else NO_WORK
