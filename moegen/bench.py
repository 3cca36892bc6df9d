"""How fast an engine goes through a step of each phase, held against the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.build import build
from moegen.graph.checks import MOST, whole
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import memory
from moegen.graph.model import ModelSpec
from moegen.graph.sound import sound_prefill, with_headroom
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.task import Lane, TaskGraph
from moegen.graph.waves import deal, room
from moegen.graph.workload import Workload
from moegen.sim.bounds import Bound, bound
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate
from moegen.timeline import Timeline

if TYPE_CHECKING:
    from moegen.exec.engine import Engine
    from moegen.exec.prepare import Prepared

# What is reached of what: the resource, its unit, the field of the machine's rate, and the columns
# of a timeline's frame whose sum is its work. CPU attention counts its own lane's alone.
_RESOURCES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("GPU arithmetic", "FLOP", "gpu_flops", ("flops",)),
    ("GPU memory", "B", "gpu_bytes_per_s", ("gpu_bytes",)),
    ("link to the GPU", "B", "h2d_bytes_per_s", ("h2d_bytes",)),
    ("link from the GPU", "B", "d2h_bytes_per_s", ("d2h_bytes",)),
    ("CPU attention", "B", "cpu_attn_bytes_per_s", ("host_bytes",)),
    ("host memory", "B", "host_bytes_per_s", ("host_bytes", "h2d_bytes", "d2h_bytes")),
)
_LANES = {"GPU arithmetic": Lane.GPU, "GPU memory": Lane.GPU, "CPU attention": Lane.CPU}

# Prompts of mixed lengths are drawn for up to so many waves: dealing them out is for many.
MIXED_WAVES = 8


@dataclass(frozen=True)
class Reached:
    """What one resource did over the measured steps.

    Attributes
    ----------
    name, unit : str
        ``unit`` is FLOP or B.
    per_step : float
        Work of a step.
    per_s : float
        Over the whole step, waiting included.
    busy_share : float
        Of the time, at least one task that works on it ran.
    busy_per_s : float
        While it was busy.
    rate : float
        What the machine's profile says it can do.
    """

    name: str
    unit: str
    per_step: float
    per_s: float
    busy_share: float
    busy_per_s: float
    rate: float


@dataclass(frozen=True)
class Phase:
    """One phase's step, measured and predicted.

    Attributes
    ----------
    tokens : int
        Prompt tokens of a wave, or rows of a decode step: what a step brings.
    measured, predicted : Timeline
        Of the same graph.
    bound : Bound
        At the rates of the machine's profile.
    reached : tuple of Reached
        Resources that have work in this phase.
    """

    graph: TaskGraph
    tokens: int
    measured: Timeline
    predicted: Timeline
    bound: Bound
    reached: tuple[Reached, ...]

    @property
    def tokens_per_s(self) -> float:
        """As measured."""
        return self.tokens / self.measured.period_s

    @property
    def share_of_bound(self) -> float:
        """The bound over the measured period: 1 is the fastest that any schedule could be."""
        return self.bound.seconds / self.measured.period_s

    @property
    def error(self) -> float:
        """Predicted over measured period, less 1."""
        return self.predicted.period_s / self.measured.period_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "measured_s": self.measured.period_s,
            "predicted_s": self.predicted.period_s,
            "error": self.error,
            "bound_s": self.bound.seconds,
            "binds": self.bound.binds,
            "share_of_bound": self.share_of_bound,
            "reached": {r.name: vars(r) for r in self.reached},
        }


def bench(
    engine: Engine,
    plan: Plan,
    prompt_len: int,
    gen_len: int,
    steps: int = 6,
    *,
    mixed: tuple[int, int] | None = None,
    on_phase: Callable[[str, TaskGraph, float], None] | None = None,
) -> dict[str, Phase]:
    """Execute a prefill wave and a decode step of ``plan`` on rows of one length.

    Parameters
    ----------
    prompt_len, gen_len : int
        Decode is measured halfway through the answers.
    steps : int
        How often each is executed; see ``Timeline.counted_steps`` for those that count.
    mixed : (int, int), optional
        Shortest and longest of prompts of many lengths, of whose waves the first is measured
        too: see `mixed_wave`.
    on_phase : callable, optional
        Called before each phase is executed, with its name, its graph and the seconds that are
        predicted of one step.

    Returns
    -------
    dict
        ``"prefill"`` and ``"decode"``, and ``"mixed prefill"`` if asked for.

    Raises
    ------
    Infeasible
        If a wave of mixed prompts does not fit the GPU.
    """
    model, hw = engine.model, engine.hardware
    graphs = {"prefill": build(model, plan.prefill, "prefill", prompt_len=prompt_len)}
    if mixed is not None:
        graphs["mixed prefill"] = mixed_wave(model, hw, plan, prompt_len, mixed)
    graphs["decode"] = build(model, plan.decode, "decode", kv_len=prompt_len + gen_len // 2)
    cost, phases = CostModel.roofline(hw), {}
    for name, graph in graphs.items():
        predicted = simulate(graph, cost, steps=min(steps, 4))
        if on_phase is not None:
            on_phase(name, graph, predicted.period_s)
        phases[name] = _measure(engine, graph, cost, steps, predicted)
    return phases


def mixed_wave(
    model: ModelSpec, hw: HardwareSpec, plan: Plan, prompt_len: int, mixed: tuple[int, int]
) -> TaskGraph:
    """A wave of a job of prompts of many lengths that has as many tokens as one of one length.

    As many prompts go together as hold the tokens of the plan's waves of ``prompt_len``, of up
    to ``MIXED_WAVES`` of them. They are dealt out as in any job, by the sound choice for them.

    Parameters
    ----------
    mixed : (int, int)
        Shortest and longest; see `mixed_prompts`.
    """
    require_mixed(model, mixed)
    waves = min(MIXED_WAVES, -(-plan.decode.B // plan.prefill.B))
    prompts = mixed_prompts(*mixed, tokens=waves * plan.prefill.B * prompt_len)
    work = Workload.from_lengths(prompts, [1] * len(prompts), name="mixed")
    s = sound_prefill(model, hw, work, plan.decode.with_(B=work.n))
    as_many = s.with_(B=-(-work.n // waves))
    ledger = memory(model, with_headroom(hw), as_many, work, phase="prefill", batch=work.n)
    if ledger.gpu.fits:
        s = as_many
    dealt = deal(prompts, room(s, work, work.n))
    wave = dealt.lengths(prompts)[0].tolist()
    return build(model, s.with_(b_a=dealt.part_rows), "prefill", lengths=wave)


def require_mixed(model: ModelSpec, mixed: tuple[int, int]) -> None:
    """Refuse prompts that are longer than a model's context, before anything is loaded.

    Parameters
    ----------
    mixed : (int, int)
        Shortest and longest.

    Raises
    ------
    InvalidInput
        Naming the context.
    """
    if mixed[1] > model.max_context:
        raise InvalidInput(
            f"prompts of up to {mixed[1]} tokens are longer than {model.name}'s context of "
            f"{model.max_context}: take a smaller longest prompt"
        )


def mixed_prompts(shortest: int, longest: int, tokens: int, seed: int = 0) -> list[int]:
    """Lengths whose logarithms are spread evenly, at random, and that make ``tokens`` together.

    The last takes what is left, and may be shorter.

    Raises
    ------
    InvalidInput
        Unless 1 <= shortest <= longest.
    """
    shortest = whole(shortest, "the shortest prompt", at_least=1, at_most=MOST)
    longest = whole(longest, "the longest prompt", at_least=1, at_most=MOST)
    if shortest > longest:
        raise InvalidInput(f"the shortest prompt has {shortest} tokens and the longest {longest}")
    random, prompts, left = np.random.default_rng(seed), [], tokens
    while left:
        length = math.exp(random.uniform(math.log(shortest), math.log(longest)))
        prompts.append(min(left, max(shortest, min(longest, round(length)))))
        left -= prompts[-1]
    return prompts


def _measure(
    engine: Engine, graph: TaskGraph, cost: CostModel, steps: int, predicted: Timeline
) -> Phase:
    assert graph.shape is not None
    measured = engine.execute(graph, steps=steps)
    return Phase(
        graph,
        graph.shape.tokens,
        measured,
        predicted,
        bound=bound(graph, cost),
        reached=_reached(measured, engine.hardware),
    )


def _reached(timeline: Timeline, hw: HardwareSpec) -> tuple[Reached, ...]:
    """Of the steps that make the period."""
    steps, (begin_s, end_s) = timeline.counted_steps, timeline.counted_window_s
    frame: Any = timeline.to_frame().sort_values(["start_s", "end_s"])
    counted = frame["step"].isin(steps)
    found = []
    for name, unit, rate, columns in _RESOURCES:
        lane = _LANES.get(name)
        done = frame[list(columns)].sum(axis=1)
        if lane is not None:
            done = done.where(frame["lane"] == lane.value, 0.0)
        per_step = float(done[counted].sum()) / len(steps)
        if not per_step:
            continue
        # Copies for the next step begin in this one: what counts is when, not for which step.
        spans = timeline.spans_s(done.index[done > 0].tolist(), begin_s, end_s)
        busy = sum(end - begin for begin, end in spans) / (end_s - begin_s)
        per_s = per_step / timeline.period_s
        found.append(
            Reached(
                name,
                unit,
                per_step=per_step,
                per_s=per_s,
                busy_share=busy,
                busy_per_s=per_s / busy,
                rate=float(getattr(hw, rate)),
            )
        )
    return tuple(found)


def plan_for_layers(prepared: Prepared, whole: ModelSpec, work: Workload) -> Plan:
    """The plan for some layers of a model that keeps on the GPU only what all of them could.

    Else a few layers would lie on the GPU whole, and nothing would be copied.

    Parameters
    ----------
    prepared : Prepared
        Of the layers.
    whole : ModelSpec
        The model that they are part of.

    Raises
    ------
    Infeasible
        If nothing fits.
    """
    plan, fixed, part = prepared.resolve(work).plan, prepared.given, prepared.model
    # A whole plan, or strategy, says what stays on the GPU.
    if part.n_layers == whole.n_layers or isinstance(fixed, (Plan, Strategy)):
        return plan
    fixed = {} if isinstance(fixed, str) else dict(fixed)
    if "s_params" in fixed:
        return plan
    hw = with_headroom(prepared.capacities)
    spare = memory(part, hw, plan.decode.with_(s_params=0), work).gpu.free_bytes
    here, all_ = (m.weight_bytes - m.head_bytes for m in (part, whole))
    kept = max(0, min(spare, all_)) * here // all_
    return prepared.with_plan(fixed | {"s_params": kept}).resolve(work).plan
