"""Shape: the sizes of one step, apart from its structure.

Structure stays the same from step to step; what changes is how long each row's history
is, which rows are still alive, and how many tokens the router sent to each expert.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moegen.errors import GraphError, InvalidInput
from moegen.graph.checks import MOST, whole, wholes
from moegen.graph.memory import residency
from moegen.graph.model import Layer, ModelSpec, Phase
from moegen.graph.task import NO_WORK, Layout, Task, TaskGraph, TaskId, Work

# A damaged file may name any count, and each row takes memory.
MOST_ROWS = 2**26


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

    Raises
    ------
    InvalidInput
        If a number is not whole or is negative, or there are more histories than new lengths.
    """

    past: tuple[int, ...]
    new: tuple[int, ...]
    expert_tokens: Mapping[int, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "past", wholes(self.past, "past", at_most=MOST))
        object.__setattr__(self, "new", wholes(self.new, "new", at_most=MOST))
        if len(self.past) != len(self.new):
            raise InvalidInput(
                f"a shape needs as many histories as new lengths, got {len(self.past)} and "
                f"{len(self.new)}"
            )
        experts = self.expert_tokens
        if experts is not None:
            if not isinstance(experts, Mapping):
                raise InvalidInput(f"expert_tokens must map layers to tokens, got {experts!r}")
            counts = {
                whole(layer, "a layer of expert_tokens"): wholes(n, f"expert_tokens[{layer}]")
                for layer, n in experts.items()
            }
            object.__setattr__(self, "expert_tokens", counts)

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
        """Inverse of ``to_dict``; InvalidInput if ``data`` are not what it gave."""
        try:
            experts = data["expert_tokens"]
            return cls(
                _unfold(data["past"]),
                _unfold(data["new"]),
                None if experts is None else {int(k): tuple(v) for k, v in experts.items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise InvalidInput(f"the shape is damaged: {type(e).__name__}: {e}") from e


def _fold(values: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for v in values:
        if runs and runs[-1][0] == v:
            runs[-1][1] += 1
        else:
            runs.append([v, 1])
    return runs


def _unfold(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    rows = sum(whole(n, "a count of rows") for _, n in runs)
    whole(rows, "the rows of a shape", at_most=MOST_ROWS)
    return tuple(v for v, n in runs for _ in range(n))


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
        self._check(g)
        self._expert_tokens: dict[int, Sequence[int]] = {}
        self._ranked: dict[int, list[int]] = {}

    def _check(self, g: TaskGraph) -> None:
        """Refuse a shape that no step of the graph can have."""
        shape = self.shape
        if g.phase == "decode" and max(shape.new, default=0) > 1:
            raise GraphError(
                f"a decode step adds 1 token a row, or 0 where the row ended, and the shape adds "
                f"{max(shape.new)}: a prompt needs a prefill graph"
            )
        if g.phase == "prefill" and max(shape.past, default=0) > 0:
            raise GraphError(
                f"a prefill step begins with empty rows, and the shape has one of "
                f"{max(shape.past)} tokens: further tokens need a decode graph"
            )
        past, new = self._past.astype(float), self._new.astype(float)
        for a in {layer.attention for layer in self.model.layers}:
            of = a.decode_flops(past + 1) if g.phase == "decode" else a.prefill_flops(new)
            if float(of.sum()) >= 2**62:
                raise InvalidInput(
                    f"rows of up to {max(*shape.past, *shape.new)} tokens are too long: the FLOPs "
                    f"of their attention do not fit 64 bits"
                )
        for index, counts in (shape.expert_tokens or {}).items():
            layer = self.model.layers[index] if index < self.model.n_layers else None
            if layer is None or layer.mlp != "moe":
                raise GraphError(f"expert_tokens names layer {index}, which has no routed experts")
            if len(counts) != layer.n_experts:
                raise GraphError(
                    f"expert_tokens of layer {index} counts {len(counts)} experts and the layer "
                    f"has {layer.n_experts}"
                )
            if sum(counts) != shape.tokens * layer.top_k:
                raise GraphError(
                    f"expert_tokens of layer {index} sum to {sum(counts)}, and {shape.tokens} "
                    f"token(s) with {layer.top_k} experts each are {shape.tokens * layer.top_k}"
                )

    def check_ranks(self, g: TaskGraph) -> None:
        """With routed fetch, refuse a shape with more active experts than tasks for them."""
        if self.strategy.fetch != "routed":
            return
        tasks = Counter(t.id.layer for t in g.tasks if t.id.op == "expert")
        for index, n in tasks.items():
            active, room = len(self.ranked_experts(index)), n * self.strategy.expert_group
            if active > room:
                raise GraphError(
                    f"layer {index} has {active} active experts and the graph tasks for {room}: "
                    f"it was built for fewer tokens"
                )

    def _part(self, positions: range) -> Part:
        past = self._past[positions.start : positions.stop]
        new = self._new[positions.start : positions.stop]
        return Part(past[new > 0], new[new > 0])

    def part(self, task_id: TaskId) -> Part:
        """The rows a task works on."""
        return self.micro_batches[task_id.microbatch] if task_id.microbatch >= 0 else self.all

    def tiles(self, tokens: int) -> int:
        """Kernels of an MLP over ``tokens``, at most ``b_e`` of them at a time."""
        return -(-tokens // self.strategy.b_e)

    def layer(self, task_id: TaskId) -> Layer:
        """The layer a task belongs to."""
        return self.model.layers[task_id.layer]

    def expert_tokens(self, layer: int) -> Sequence[int]:
        """Tokens per expert: those given, or an even routing's whole numbers."""
        if layer not in self._expert_tokens:
            self._expert_tokens[layer] = self._count_tokens(layer)
        return self._expert_tokens[layer]

    def tokens_are_given(self, layer: int) -> bool:
        """Whether the shape says what each expert of a layer got."""
        return layer in (self.shape.expert_tokens or ())

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
    """``g`` with the work of ``shape`` in each task; the structure stays as it is.

    Raises
    ------
    GraphError
        If the graph was made by hand or is unrolled, or no step of it can have this shape:
        other rows, another phase, tokens per expert that the routing cannot give.
    InvalidInput
        If rows are so long that their work cannot be counted.
    """
    if g.n_steps != 1:
        raise GraphError("bind a step before unrolling it")
    sizes = Sizes(g, shape)
    sizes.check_ranks(g)
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
