"""Times of single steps of a model, from simulating few of its layers.

Layers repeat, and so does what a step does in them. What one more repeat adds to a step is the
difference between steps of two models that consist of repeats alone and differ by one; what
begins and ends a step is the same in both and drops out. So much is added, for each repeat that
is left out, to a step of a model that has the other layers and a few of the repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from moegen.graph.build import build, lay_out
from moegen.graph.model import Layer, ModelSpec, Phase
from moegen.graph.residency import residency
from moegen.graph.shape import Shape
from moegen.graph.strategy import Strategy
from moegen.graph.task import Lane, Task, TaskGraph, Work
from moegen.sim.cost import Cost, CostModel
from moegen.sim.engine import simulate
from moegen.sim.scaled import Wrapped, times

# Repeats in the smaller of the two, where nothing speaks for more; where it does, at most.
LEAST_REPEATS, MOST_REPEATS = 2, 8
# And in the model with the other layers, after which copies are further ahead than later on.
REPEATS_AFTER_OTHERS = 3
# A repeat in the first step, where copies come too late, and in the next, where they may be
# ahead, settle at one pace. Where they differ by more, of a step, it takes more repeats.
SETTLED = 0.005
# Tasks for the experts of a layer. More experts go together: they are alike, and in order.
EXPERT_TASKS = 16
# Slots for experts that must be left when they do.
EXPERT_SLOTS = 4
# The first finds nothing prefetched, the last is followed by none, the one between them is
# like those of a long run.
STEPS = 3


class StepTimes:
    """Times of the steps of one structure: a model, a strategy, a layout.

    Parameters
    ----------
    model : ModelSpec
    s : Strategy
    phase : {"decode", "prefill"}
    lengths : sequence of int
        Of the rows that it is laid out for: tokens in the KV store, or of prompts.
    cost : CostModel
    shared : bool
        Whether tasks that run at the same time share resources; see ``simulate``.
    """

    def __init__(
        self,
        model: ModelSpec,
        s: Strategy,
        phase: Phase,
        lengths: Sequence[int],
        cost: CostModel,
        shared: bool,
    ) -> None:
        rows = len(lengths)
        omega = 0.0
        if phase == "decode":
            layout = lay_out(s, phase, Shape(tuple(lengths), (1,) * rows))
            omega = layout.cpu_rows / rows
        # Of a strategy the structure has the rows on each side, not what they came from.
        self._model, self._s, self._phase = model, s.with_(B=rows, omega=omega), phase
        self._given, self._shared = cost, shared
        self._build(_least_repeats(model, self._s))

    def _build(self, least: int) -> None:
        few = _few(self._model, self._s, least)
        self._least, self._missing = least, few.missing
        self._cost = _FewCost(self._given, few) if few.missing else self._given
        self._graphs = [_graph(m, s, self._phase) for m, s in few.models]

    def __call__(self, shape: Shape) -> tuple[float, float]:
        """Seconds of a step that finds nothing prefetched, and of one that follows another."""
        while True:
            base, *pair = (self._simulated(graph.bind(shape)) for graph in self._graphs)
            if not pair:
                return base
            less, more = pair if len(pair) == 2 else (base, pair[0])
            first_s, next_s = (self._missing * (y - x) for x, y in zip(less, more, strict=True))
            settled = abs(first_s - next_s) <= SETTLED * (base[1] + next_s)
            if settled or self._least == MOST_REPEATS:
                return base[0] + first_s, base[1] + next_s
            self._build(min(MOST_REPEATS, 2 * self._least + 1))

    def lane_seconds(self, shape: Shape) -> dict[Lane, float]:
        """What each lane has to do in a step, of the layers that are simulated."""
        bound = self._graphs[0].bind(shape)
        return {lane: sum(map(self._cost.seconds, tasks)) for lane, tasks in bound.lanes.items()}

    def _simulated(self, graph: TaskGraph) -> tuple[float, float]:
        run = simulate(graph, self._cost, STEPS, self._shared)
        return float(run.step_end_s[0]), run.period_s


@lru_cache(maxsize=64)
def _graph(model: ModelSpec, s: Strategy, phase: Phase) -> TaskGraph:
    """A step's graph for any lengths: as many rows as ``s.B``, ``s.omega`` of them on the CPU."""
    return build(model, s, phase, lengths=(1,) * s.B)


@dataclass(frozen=True)
class _Few:
    """Models of few layers in place of a deep one.

    Attributes
    ----------
    models : tuple of (ModelSpec, Strategy)
        One that has all layers that are no repeats, and two of repeats alone that differ by
        one. The first is the smaller of those where all layers are repeats; the model itself
        is the only one where that is hardly deeper.
    missing : int
        Repeats that the deep one has more than the first.
    grouped : int
        Tasks of experts that are one task in these.
    copied : dict of str to float
        By op, what the deep one copies of a layer in the mean over what these copy.
    """

    models: tuple[tuple[ModelSpec, Strategy], ...]
    missing: int = 0
    grouped: int = 1
    copied: Mapping[str, float] = field(default_factory=dict)


@lru_cache(maxsize=256)
def _few(model: ModelSpec, s: Strategy, least: int) -> _Few:
    """For ``least`` repeats in the smaller model of the pair."""
    head, period = _pattern(model)
    repeats = (model.n_layers - head) // period
    if repeats <= max(least, REPEATS_AFTER_OTHERS) + 1:
        return _Few(((model, s),))
    kept = residency(model, s.s_params)
    all_dense = all(kept.dense)
    # Some layers keep an expert more than others. In these all keep as many, and a copy takes
    # as long as those of the mean layer.
    stays, copied = _stays(model, s), {}
    if not all_dense:
        dense_bytes = sum(layer.dense_bytes for layer in model.layers)
        copied["copy_dense"] = 1 - kept.dense_bytes / dense_bytes
    if model.moe_layers:
        n_experts = model.layers[model.moe_layers[0]].n_experts
        mean = sum(kept.experts) / model.n_moe_layers
        if stays < n_experts:
            copied["copy_expert"] = (n_experts - mean) / (n_experts - stays)
    grouped = _grouped(model, s, stays)
    cuts = [(head, head + n * period) for n in (least, least + 1)]
    if head:
        least = REPEATS_AFTER_OTHERS
        cuts.insert(0, (0, head + least * period))
    models = []
    for begin, end in cuts:
        layers = model.layers[begin:end]
        few = replace(model, name=f"{model.name}, layers {begin} to {end}", layers=layers)
        s_params = sum(_kept_bytes(layer, stays) for layer in layers) if all_dense else 0
        group = s.expert_group * grouped
        models.append((few, s.with_(s_params=s_params, expert_group=group)))
    return _Few(tuple(models), repeats - least, grouped, copied)


def _kept_bytes(layer: Layer, experts: int) -> int:
    if layer.mlp != "moe":
        return layer.dense_bytes
    return layer.dense_bytes + experts * (layer.expert_bytes + layer.expert_scale_bytes)


def _stays(model: ModelSpec, s: Strategy) -> int:
    """Experts that every layer of few keeps on the GPU."""
    kept = residency(model, s.s_params)
    if not model.moe_layers or not all(kept.dense):
        return 0
    return sum(kept.experts) // model.n_moe_layers


@lru_cache(maxsize=256)
def _least_repeats(model: ModelSpec, s: Strategy) -> int:
    """Repeats after which KV or experts no longer wait for the slots of a step before."""
    ahead = 0.0  # layers whose copies fill the slots
    on_gpu = s.B - round(s.omega * s.B)
    if on_gpu:
        ahead = s.kv_slots / -(-on_gpu // s.b_a)
    if model.moe_layers:
        copied = model.layers[model.moe_layers[0]].n_experts - _stays(model, s)
        slots = max(1, s.s_expert // (model.expert_bytes * s.expert_group))
        ahead = max(ahead, slots / -(-copied // s.expert_group) if copied else 0.0)
    ahead = round(ahead / _pattern(model)[1])
    return LEAST_REPEATS if ahead <= 1 else min(MOST_REPEATS, 2 * ahead + 1)


def _grouped(model: ModelSpec, s: Strategy, stays: int) -> int:
    """How many tasks of experts are one: as many as leave enough of them, and of slots."""
    if not model.moe_layers:
        return 1
    copied = model.layers[model.moe_layers[0]].n_experts - stays
    tasks = -(-copied // s.expert_group)
    slots = s.s_expert // (model.expert_bytes * s.expert_group)
    return max(1, min(tasks // EXPERT_TASKS, slots // EXPERT_SLOTS))


def _pattern(model: ModelSpec) -> tuple[int, int]:
    """How many layers go ahead, and after how many the others repeat themselves.

    Leading dense layers are ahead; layers with and without a sliding window alternate.
    """
    layers = model.layers
    ahead = []
    for period in range(1, 5):
        differ = [i + 1 for i in range(len(layers) - period) if layers[i] != layers[i + period]]
        ahead.append((max(differ, default=0), period))
    return min(ahead)


class _FewCost(Wrapped):
    """What the tasks of models of few layers cost, by what those of the deep model do."""

    def __init__(self, cost: CostModel, few: _Few) -> None:
        super().__init__(cost)
        self._few = few

    def estimate(self, task: Task) -> Cost:
        factor = self._few.copied.get(task.id.op, 1.0)
        work = task.work
        if work is not None and task.id.expert >= 0 and min(self._few.grouped, work.launches) > 1:
            # It stands for several, each of which launches something: the mean one.
            several = min(self._few.grouped, work.launches)
            share = {f.name: getattr(work, f.name) / several for f in fields(work)}
            task, factor = replace(task, work=Work(**share)), factor * several
        cost = self.of.estimate(task)
        if factor == 1.0:
            return cost
        # Of all of them. After a rest all is as cold as the first is, where those behind it would
        # be less: a thousandth of a step at most.
        issue_s, turn_s = cost.issue_s * factor, cost.turn_s * factor
        return replace(times(cost, factor), issue_s=issue_s, turn_s=turn_s)
