"""How long a whole job takes: its batches, waves and layouts, a few steps of each simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.build import build
from moegen.graph.checks import MOST, wholes
from moegen.graph.model import ModelSpec, Phase
from moegen.graph.shape import Shape
from moegen.graph.strategy import BARRIER_SHARE, Plan, Strategy
from moegen.graph.task import Lane, TaskGraph
from moegen.graph.waves import Room, deal, room
from moegen.graph.workload import Workload
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate
from moegen.timeline import Timeline

# An estimate is for someone who waits: how much of a job is simulated to make it. Of a deep
# model a few layers, so that a step has about so many tasks; of a long job a few of its steps.
TASKS_PER_STEP, LEAST_REPEATS = 250, 4
TASKS_IN_ALL, LEAST_ANCHORS = 10_000, 6
# Steps simulated for one step's time: the first finds nothing prefetched, the last is followed
# by none, the one between them is like those of a long run.
STEPS = 3
# Of one layout's steps, and of the waves of one size, so many are simulated.
ANCHORS_OF_RUN = 3


@dataclass(frozen=True)
class JobEstimate:
    """How long a job takes by the simulator, and what it consists of.

    Attributes
    ----------
    prefill_s, decode_s : float
        Time of all waves, and of all steps.
    prefill_waves, decode_steps : int
    prompt_tokens, gen_tokens : int
        Tokens of all prompts; tokens generated, each row's first, which prefill gives, included.
    """

    prefill_s: float
    decode_s: float
    prefill_waves: int
    decode_steps: int
    prompt_tokens: int
    gen_tokens: int

    @property
    def time_s(self) -> float:
        """Both phases; loading the model is no part of it."""
        return self.prefill_s + self.decode_s


def estimate_job(
    model: ModelSpec,
    plan: Plan,
    prompt_lens: Sequence[int],
    gen_lens: Sequence[int],
    cost: CostModel,
    *,
    shared: bool = True,
) -> JobEstimate:
    """How long the executor takes to answer prompts by ``plan``, if the cost model is right.

    Follows `moegen.exec.generate`: batches of ``plan.decode.B`` rows in order; each is
    prefilled in waves of at most ``plan.prefill.B`` prompts, dealt out by length, and then
    decoded in layouts, anew whenever half of the rows it was laid out for have ended. The first
    step of a layout counts from where nothing is prefetched, the others from the end of the one
    before.

    It takes seconds for any job. What is simulated is a few steps of a few layouts, of deep
    models a few layers. Steps between are interpolated over the tokens that are attended to,
    layouts are taken to be like the nearest one, layers are added at the pace of the others.

    Parameters
    ----------
    model : ModelSpec
    plan : Plan
    prompt_lens, gen_lens : sequence of int, shape [rows]
        Tokens of each prompt, and tokens to generate for it, at least 1: its limit before a
        run, what came after it.
    cost : CostModel
    shared : bool
        Whether tasks that run at the same time share resources; see ``simulate``.

    Raises
    ------
    InvalidInput
        If the two are not equally long, or a length is no whole number of at least 1.
    """
    prompts = wholes(prompt_lens, "prompt_lens", at_least=1, at_most=MOST)
    gens = wholes(gen_lens, "gen_lens", at_least=1, at_most=MOST)
    if len(prompts) != len(gens):
        raise InvalidInput(
            f"prompt_lens and gen_lens must be equally long, got {len(prompts)} and {len(gens)}"
        )
    prompt, gen = np.array(prompts, dtype=np.int64), np.array(gens, dtype=np.int64)
    batches = [slice(i, i + plan.decode.B) for i in range(0, len(prompts), plan.decode.B)]
    clock = _Clock(model, cost, shared)
    prefill_s, waves = 0.0, 0
    if batches:
        most = room(plan.prefill, Workload.from_lengths(prompts, gens), plan.decode.B)
        prefill_s, waves = _prefill(clock, plan.prefill, [prompt[b] for b in batches], most)
    decode_s, steps = _decode(clock, plan.decode, [(prompt[b], gen[b]) for b in batches])
    return JobEstimate(
        prefill_s=prefill_s,
        decode_s=decode_s,
        prefill_waves=waves,
        decode_steps=steps,
        prompt_tokens=int(prompt.sum()),
        gen_tokens=int(gen.sum()),
    )


def _prefill(
    clock: _Clock, s: Strategy, batches: Sequence[np.ndarray], most: Room
) -> tuple[float, int]:
    """Seconds and number of all waves. Waves of as many places and parts have one structure."""
    by_size: dict[tuple[int, int], list[np.ndarray]] = {}
    for prompts in batches:
        waves = deal(prompts, most)
        size = (waves.rows.shape[1], waves.part_rows)
        by_size.setdefault(size, []).append(waves.lengths(prompts))
    seconds = 0.0
    for (places, part_rows), several in by_size.items():
        shapes = [Shape((0,) * places, tuple(wave)) for waves in several for wave in waves.tolist()]
        tokens = np.array([shape.tokens for shape in shapes])
        anchors = _spread(tokens, ANCHORS_OF_RUN)
        # The first wave of a batch has no empty place.
        graph = clock.graph(s.with_(b_a=part_rows), "prefill", several[0][0].tolist())
        times = np.array([clock.times(graph, shapes[i]) for i in anchors])
        first_s, next_s = (np.interp(tokens, tokens[anchors], column) for column in times.T)
        begins = np.cumsum([0, *map(len, several)])[:-1]
        seconds += float(next_s.sum() + (first_s - next_s)[begins].sum())
    return seconds, sum(len(waves) for several in by_size.values() for waves in several)


class _Layout:
    """A run of decode steps with one structure, from one barrier to the next.

    Parameters
    ----------
    past : ndarray of int64, shape [rows]
        Tokens each row has in the KV store before the first step.
    left : ndarray of int64, shape [rows]
        Tokens each row still generates, at least 1.
    """

    def __init__(self, past: np.ndarray, left: np.ndarray) -> None:
        self.past, self.left = past, left
        rows = len(left)
        # It goes on while more than this share of the rows is left: while the row that tips
        # the scale is.
        tips = min(int(BARRIER_SHARE * rows), rows - 1)
        self.steps = int(np.sort(left)[::-1][tips])

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens that are attended to in each step, shape [steps]."""
        order = np.argsort(self.left, kind="stable")
        past = self.past[order]
        step = np.arange(self.steps)
        ended = np.searchsorted(self.left[order], step, side="right")
        of_ended = np.concatenate([[0], np.cumsum(past)])[ended]
        return past.sum() - of_ended + (len(past) - ended) * (step + 1)

    def shape(self, step: int) -> Shape:
        live = self.left > step
        past = np.where(live, self.past + step, 0)
        return Shape(tuple(past.tolist()), tuple(live.astype(int).tolist()))

    def after(self) -> _Layout | None:
        """What is laid out next, or None if every row has ended."""
        live = self.left > self.steps
        if not live.any():
            return None
        return _Layout(self.past[live] + self.steps, self.left[live] - self.steps)


def _layouts(prompts: np.ndarray, gens: np.ndarray) -> Iterator[_Layout]:
    """The layouts that a batch goes through, once prefill has given each row its first token."""
    live = gens > 1
    layout = _Layout(prompts[live], gens[live] - 1) if live.any() else None
    while layout is not None:
        yield layout
        layout = layout.after()


def _decode(
    clock: _Clock, s: Strategy, batches: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, int]:
    """Seconds and number of all steps."""
    layouts = [layout for batch in batches for layout in _layouts(*batch)]
    if not layouts:
        return 0.0, 0
    steps = np.array([layout.steps for layout in layouts])
    first = clock.graph(s, "decode", layouts[0].past.tolist())
    anchors = max(LEAST_ANCHORS, TASKS_IN_ALL // (STEPS * len(first)))
    sizes = np.log([(len(layout.left), layout.tokens.mean()) for layout in layouts])
    some, stands_for = _representatives(sizes, steps, anchors // ANCHORS_OF_RUN)
    first_s, next_s = np.array([_run(clock, s, layouts[i]) for i in some])[stands_for].T
    return float((first_s + (steps - 1) * next_s).sum()), int(steps.sum())


def _representatives(
    points: np.ndarray, weights: np.ndarray, n: int
) -> tuple[list[int], np.ndarray]:
    """At most ``n`` of many points that stand for all of them.

    Parameters
    ----------
    points : ndarray, shape [points, coordinates]
    weights : ndarray, shape [points]
        How much it matters that a point has one near it.

    Returns
    -------
    chosen : list of int
    stands_for : ndarray of int, shape [points]
        The position in ``chosen`` of the one that is nearest to each point.
    """
    chosen: list[int] = []
    nearest = np.full(len(points), np.inf)
    stands_for = np.zeros(len(points), dtype=int)
    while len(chosen) < n and nearest.any():
        worst = int((np.minimum(nearest, 1e9) * weights).argmax())
        away = np.abs(points - points[worst]).sum(axis=1)
        stands_for[away < nearest] = len(chosen)
        nearest = np.minimum(nearest, away)
        chosen.append(worst)
    return chosen, stands_for


def _run(clock: _Clock, s: Strategy, layout: _Layout) -> tuple[float, float]:
    """Seconds of a layout's first step, and of one that follows it in the mean."""
    graph = clock.graph(s, "decode", layout.past.tolist())
    # Tokens grow and drop: the way that they went tells how far a step is from another.
    way = np.concatenate([[0], np.cumsum(np.abs(np.diff(layout.tokens)))])
    anchors = _spread(way, ANCHORS_OF_RUN)
    times = np.array([clock.times(graph, layout.shape(int(k))) for k in anchors])
    follow = np.interp(way[1:], way[anchors], times[:, 1])
    return float(times[0, 0]), float(follow.mean()) if len(follow) else 0.0


def _spread(values: np.ndarray, n: int) -> np.ndarray:
    """Indices of at most ``n`` different values, the least and the greatest among them, in order.

    The others lie as evenly between as the values allow.
    """
    unique, index = np.unique(values, return_index=True)
    if len(unique) > n:
        wanted = np.linspace(unique[0], unique[-1], n)
        near = np.abs(unique[None, :] - wanted[:, None]).argmin(axis=1)
        index = index[np.unique(near)]
    return index


class _Clock:
    """Times of single steps of a model, from simulating as few layers as will do."""

    def __init__(self, model: ModelSpec, cost: CostModel, shared: bool) -> None:
        self.model, self.cost, self.shared = model, cost, shared
        self.head, self.period = _pattern(model)
        self.repeats = (model.n_layers - self.head) // self.period

    def graph(self, s: Strategy, phase: Phase, lengths: Sequence[int]) -> TaskGraph:
        """A step's graph, of so few layers that it has about ``TASKS_PER_STEP`` tasks."""
        graph = self._repeated(LEAST_REPEATS, s, phase, lengths)
        repeats = LEAST_REPEATS * TASKS_PER_STEP // len(graph)
        return self._repeated(repeats, s, phase, lengths) if repeats > LEAST_REPEATS else graph

    def _repeated(
        self, repeats: int, s: Strategy, phase: Phase, lengths: Sequence[int]
    ) -> TaskGraph:
        if repeats >= self.repeats:
            return build(self.model, s, phase, lengths=lengths)
        missing = (self.repeats - repeats) * self.period
        few = self.model.with_(n_layers=self.model.n_layers - missing)
        # Each layer keeps its share of what stays on the GPU.
        weights, of_few = (sum(x.weight_bytes for x in m.layers) for m in (self.model, few))
        s_params = -(-s.s_params * of_few // weights)
        return build(few, s.with_(s_params=s_params), phase, lengths=lengths)

    def times(self, graph: TaskGraph, shape: Shape) -> tuple[float, float]:
        """Seconds of a step that finds nothing prefetched, and of one that follows another."""
        run = simulate(graph.bind(shape), self.cost, STEPS, self.shared)
        first_s, next_s = float(run.step_end_s[0]), run.period_s
        assert graph.model is not None
        missing = (self.model.n_layers - graph.model.n_layers) // self.period
        if missing:
            first_s += missing * self._repeat_s(run, 0)
            next_s += missing * self._repeat_s(run, 1)
        return first_s, next_s

    def _repeat_s(self, run: Timeline, step: int) -> float:
        """Seconds that one more repeat adds to a step: the pace of all but the first two."""
        ends: dict[int, float] = {}
        for task_id, task, end_s in zip(run.ids, run.tasks, run.end_s.tolist(), strict=True):
            if task_id.step == step and task.lane is Lane.GPU:
                ends[task_id.layer] = max(ends.get(task_id.layer, 0.0), end_s)
        last = max(ends)
        back = (last + 1 - self.head) // self.period - 2
        return (ends[last] - ends[last - back * self.period]) / back


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
