"""Times of single steps of a model, from simulating few of its layers.

Layers repeat, and so does what a step does in them. What one more repeat adds to a step is the
difference between steps of two models that differ by one; what begins and ends a step, and what
copies find prefetched after layers that are no repeats, is the same in both and drops out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

# Repeats in the smaller of the two models. After leading layers of another kind copies are
# ahead of where they are later, and it takes another repeat until that has settled.
REPEATS, REPEATS_AFTER_OTHERS = 2, 3
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

    Attributes
    ----------
    n_tasks : int
        Tasks that are simulated for one shape.
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
        few = _few(model, s.with_(B=rows, omega=omega))
        self._missing, self._shared = few.missing, shared
        self._cost = _FewCost(cost, few) if few.missing else cost
        self._graphs = [_graph(m, of_m, phase) for m, of_m in few.models]
        self.n_tasks = STEPS * sum(map(len, self._graphs))

    def __call__(self, shape: Shape) -> tuple[float, float]:
        """Seconds of a step that finds nothing prefetched, and of one that follows another."""
        (first_s, next_s), *more = (self._simulated(graph, shape) for graph in self._graphs)
        for more_first_s, more_next_s in more:
            first_s += self._missing * (more_first_s - first_s)
            next_s += self._missing * (more_next_s - next_s)
        return first_s, next_s

    def lane_seconds(self, shape: Shape) -> dict[Lane, float]:
        """What each lane has to do in a step, of the layers that are simulated."""
        bound = self._graphs[-1].bind(shape)
        return {lane: sum(map(self._cost.seconds, tasks)) for lane, tasks in bound.lanes.items()}

    def _simulated(self, graph: TaskGraph, shape: Shape) -> tuple[float, float]:
        run = simulate(graph.bind(shape), self._cost, STEPS, self._shared)
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
        Two that differ by one repeat; the model alone where that is hardly deeper.
    missing : int
        Repeats that the deep one has more than the first of them.
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
def _few(model: ModelSpec, s: Strategy) -> _Few:
    head, period = _pattern(model)
    repeats = (model.n_layers - head) // period
    least = REPEATS_AFTER_OTHERS if head else REPEATS
    if repeats <= least + 1:
        return _Few(((model, s),))
    kept = residency(model, s.s_params)
    all_dense = all(kept.dense)
    # Some layers keep an expert more than others. In these all keep as many, and a copy takes
    # as long as those of the mean layer.
    stays, copied = 0, {}
    if not all_dense:
        dense_bytes = sum(layer.dense_bytes for layer in model.layers)
        copied["copy_dense"] = 1 - kept.dense_bytes / dense_bytes
    if model.moe_layers:
        n_experts = model.layers[model.moe_layers[0]].n_experts
        mean = sum(kept.experts) / model.n_moe_layers
        stays = int(mean) if all_dense else 0
        if stays < n_experts:
            copied["copy_expert"] = (n_experts - mean) / (n_experts - stays)
    grouped = _grouped(model, s, stays)
    models = []
    for n in (least, least + 1):
        few = model.with_(n_layers=head + n * period)
        s_params = sum(_kept_bytes(layer, stays) for layer in few.layers) if all_dense else 0
        group = s.expert_group * grouped
        models.append((few, s.with_(s_params=s_params, expert_group=group)))
    return _Few(tuple(models), repeats - least, grouped, copied)


def _kept_bytes(layer: Layer, experts: int) -> int:
    if layer.mlp != "moe":
        return layer.dense_bytes
    return layer.dense_bytes + experts * (layer.expert_bytes + layer.expert_scale_bytes)


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


class _FewCost(CostModel):
    """What the tasks of models of few layers cost, by what those of the deep model do."""

    def __init__(self, cost: CostModel, few: _Few) -> None:
        self._cost, self._few = cost, few

    def __repr__(self) -> str:
        return repr(self._cost)

    def capacities(self, in_use: Collection[str] = ()) -> Mapping[str, float]:
        return self._cost.capacities(in_use)

    def estimate(self, task: Task) -> Cost:
        times = self._few.copied.get(task.id.op, 1.0)
        work = task.work
        if work is not None and task.id.expert >= 0 and min(self._few.grouped, work.launches) > 1:
            # It stands for several, each of which launches something: the mean one.
            several = min(self._few.grouped, work.launches)
            share = {f.name: getattr(work, f.name) / several for f in fields(work)}
            task, times = replace(task, work=Work(**share)), times * several
        cost = self._cost.estimate(task)
        if times == 1.0:
            return cost
        demands = {name: units * times for name, units in cost.demands.items()}
        return Cost(cost.seconds * times, cost.provenance, demands)
