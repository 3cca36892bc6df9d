"""Plans, predictions and runs in words."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import moegen as mg
from moegen.graph.hardware import CPU_LANES, HardwareSpec
from moegen.graph.hardware_text import gpu
from moegen.jobs import Report
from moegen.parts import PARTS
from moegen.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from moegen.bench import Phase
    from moegen.graph.profile_table import ProfileTable
    from moegen.sim.bounds import Bound


def part(name: str) -> str:
    """What limits a step, for someone who has not read the design."""
    return PARTS[name].phrase


def counted(n: int, thing: str) -> str:
    """So many of a thing: "1 row", "1,200 rows"."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def strategy_in_fields(s: mg.Strategy) -> str:
    """A strategy by its fields, in the order of the flags."""
    sizes = ("s_expert", "s_params")
    return ", ".join(
        f"{name}={format_bytes(value) if name in sizes else value}"
        for name, value in s.to_dict().items()
    )


def strategy_in_flags(s: mg.Strategy) -> str:
    """A strategy as flags that bring it back."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in s.to_dict().items())


def origin_of_rates(hw: HardwareSpec, on: str = "this machine") -> str:
    """Where the rates that a prediction rests on come from; ``on`` is whose they are."""
    of_kind: dict[str, list[str]] = {}
    for name, label in hw.rates.items():
        of_kind.setdefault(hw.kind(name), []).append(label)
    if len(of_kind) == 1 and "measured" not in of_kind:
        return f"all {next(iter(of_kind))}"
    if list(of_kind) == ["measured"]:
        days = {
            day[0] for name in hw.rates if (day := re.findall(r"\d{4}-\d\d-\d\d", hw.source[name]))
        }
        return f"all measured on {on} ({', '.join(sorted(days))})"
    return "; ".join(f"{kind}: {', '.join(labels)}" for kind, labels in of_kind.items())


def opening(report: Report) -> Iterator[str]:
    """What is said before the weights are loaded."""
    prepared, resolved, expected = report.prepared, report.resolved, report.expected
    assert resolved is not None and expected is not None
    name = f" ({prepared.hardware.gpu_name})" if report.on_gpu else ""
    yield f"Device {prepared.device.type}{name}, {prepared.model.dtype}"
    yield f"Prefill: {strategy_in_fields(resolved.plan.prefill)}"
    yield f"Decode:  {strategy_in_fields(resolved.plan.decode)}"
    host, on_gpu = (report.memory[name] for name in ("host", "gpu"))
    yield f"Memory:  host {_of(host)}, {_gpu(report)} {_of(on_gpu)}"
    yield (
        f"Time:    about {format_seconds(expected.time_s)} expected, if every answer is as long "
        f"as it may be: prefill {format_seconds(expected.prefill_s)}, decode "
        f"{format_seconds(expected.decode_s)}"
    )
    yield f"Rates:   {origin_of_rates(prepared.hardware)}"


def _gpu(report: Report) -> str:
    return "GPU" if report.on_gpu else gpu(CPU_LANES)


def _of(section: dict[str, int | None]) -> str:
    planned, capacity = section["planned_bytes"], section["capacity_bytes"]
    assert planned is not None and capacity is not None
    return f"{format_bytes(planned)} of {format_bytes(capacity)}"


def closing(report: Report, output: Path) -> Iterator[str]:
    """What is said when all is done."""
    summary = report.summary
    assert summary is not None
    errors = f", {summary.errors} could not be served" if summary.errors else ""
    yield (
        f"{summary.served} of {counted(summary.rows, 'row')} answered{errors}: "
        f"{summary.prompt_tokens} prompt and "
        f"{counted(summary.completion_tokens, 'completion token')} in "
        f"{format_seconds(summary.time_s)}, "
        f"{summary.tokens_per_s:.1f} tokens/s"
    )
    if report.resolved is not None:
        yield from _against_the_plan(report)
    yield from (f"  Note     {note}" for note in report.notes)
    yield f"  Answers  {output}"


def _against_the_plan(report: Report) -> Iterator[str]:
    summary, predicted, resolved = report.summary, report.predicted, report.resolved
    assert summary is not None and predicted is not None and resolved is not None
    yield f"  Prefill  {strategy_in_fields(resolved.plan.prefill)}"
    yield f"  Decode   {strategy_in_fields(resolved.plan.decode)}"
    loaded, load_s = report.load_bytes, report.load_s
    yield (
        f"  Loading  {loaded / 1e9:.2f} GB in {format_seconds(load_s)}, "
        f"{loaded / load_s / 1e9:.2f} GB/s"
    )
    yield f"  Time     {_held(report.measured_s, predicted.time_s, 'predicted for these answers')}"
    yield f"           prefill {_held(summary.prefill_s, predicted.prefill_s)}"
    yield f"           decode {_held(summary.decode_s, predicted.decode_s)}"
    if report.busy is not None:
        yield f"           {report.busy}"
    yield f"  Rates    {origin_of_rates(report.prepared.hardware)}"
    if resolved.plan.decode.omega > 0 or not report.on_gpu:
        yield f"  CPU      attention by {report.cpu_attention}"
    host, on_gpu = report.memory["host"], report.memory["gpu"]
    at_peak, in_host = host["peak_bytes"], host["in_host_bytes"]
    assert in_host is not None
    if report.on_gpu:
        yield f"  Memory   host {_of(host)} planned, {_peak(at_peak)} at its peak"
        yield f"           GPU {_of(on_gpu)} planned, {_peak(on_gpu['peak_bytes'])} at its peak"
    else:
        yield f"  Memory   planned: host {_of(host)}, {_gpu(report)} {_of(on_gpu)}"
        yield (
            f"           both lie in host memory: {format_bytes(in_host)} planned, "
            f"{_peak(at_peak)} at its peak"
        )


def _held(measured_s: float, predicted_s: float, predicted: str = "predicted") -> str:
    off = f" ({predicted_s / measured_s - 1:+.0%})" if measured_s and predicted_s else ""
    return f"{format_seconds(measured_s)}, {predicted} {format_seconds(predicted_s)}{off}"


def _peak(n: int | None) -> str:
    return format_bytes(n) if n else "an unknown amount"


def anatomy(spec: mg.ModelSpec) -> Iterator[str]:
    """What a model is made of."""
    yield f"{spec.name} (family {spec.model_type}, {spec.dtype})"
    routed = f"{spec.routed_params:,} of them in routed experts"
    yield f"  parameters    {spec.n_params:,}, {routed}"
    yield f"  weights       {format_bytes(spec.weight_bytes)}"
    yield f"  context       {spec.max_context:,} tokens at most"
    yield f"  KV            {format_bytes(spec.kv_bytes_per_token)} a token, all layers"
    yield f"  layers        {spec.n_layers}"
    for name, indices in spec.layer_classes.items():
        layer = spec.layers[indices[0]]
        of = layer.attention
        heads = f"{of.n_heads} query and {of.n_kv_heads} key-value heads"
        if of.kind == "mla":
            heads = f"{of.n_heads} heads, a latent of {of.kv_lora_rank} + {of.rope_head_dim}"
        window = f", window of {of.window} tokens" if of.window else ""
        yield f"    {len(indices):>3} {name}"
        yield f"        attention {of.kind}, {heads}{window}"
        if layer.mlp == "moe":
            each = format_bytes(layer.expert_bytes + layer.expert_scale_bytes)
            yield f"        {layer.n_experts} experts of {each}, {layer.top_k} for each token"
        yield f"        {format_bytes(layer.dense_bytes)} of other weights"


def plan_in_words(
    model: mg.ModelSpec,
    hw: HardwareSpec,
    work: mg.Workload,
    plan: mg.Plan,
    ledgers: Mapping[str, mg.Ledger],
    cost: mg.CostModel,
) -> Iterator[str]:
    """A plan that was searched, what is predicted of it, and what else was looked at."""
    from moegen.sim.measured import Measured

    assert plan.binds is not None and plan.bound_share is not None and plan.time_s is not None
    d, p = plan.decode, plan.prefill
    yield f"{model.name} on {hw.name}: {work.name}, {counted(work.n, 'row')}"
    yield from _item("Decode", _decode(model, d))
    yield from _item("Prefill", _prefill(model, p))
    yield from _item("Memory", _both_memories(ledgers))
    speed = f"prefill {plan.prefill_tokens_per_s:,.1f} prompt tokens/s"
    if plan.decode_tokens_per_s is not None:
        speed += f", decode {plan.decode_tokens_per_s:,.1f} tokens/s"
    yield from _item("Speed", speed)
    times = {"loading": plan.load_s, "prefill": plan.prefill_s, "decode": plan.decode_s}
    parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in times.items() if s)
    yield from _item("Job", f"{format_seconds(plan.time_s)}: {parts}")
    reached = {phase: f" ({share:.0%} of it reached)" for phase, share in plan.bound_share.items()}
    yield from _item(
        "Limits",
        f"of a decode step {part(plan.binds['decode'])}{reached['decode']}; of a prefill wave "
        f"{part(plan.binds['prefill'])}{reached['prefill']}",
    )
    looked = f"the best of {plan.n_evaluated:,} strategies that fit"
    yield from _item("Search", "; ".join([looked, *map(str, plan.rejected)]))
    for note in plan.notes:
        yield from _item("Note", note)
    if isinstance(cost, Measured):
        yield from _item("Profile", _profile(hw, cost.table))
    yield from rates(hw)
    yield f"{'Flags':<9}{strategy_in_flags(d)}"


def rates(hw: HardwareSpec, whose: str = "") -> list[str]:
    """The line of a prediction that says where a machine's rates come from."""
    return _item("Rates", whose + origin_of_rates(hw, hw.name))


def _profile(hw: HardwareSpec, table: ProfileTable) -> str:
    """Which profile a plan rests on, and whose memory it counts on."""
    measured = f"measured {table.date} on {table.machine.name}; what it lacks rests on rates"
    sizes = {(m.host_memory_bytes, m.gpu_memory_bytes) for m in (hw, table.machine)}
    whose = "that machine's too" if len(sizes) == 1 else f"that of {hw.name}"
    return f"{measured}. Memory is {whose}"


def _item(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=79,
        initial_indent=f"{name:<9}",
        subsequent_indent=" " * 9,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _decode(model: mg.ModelSpec, s: mg.Strategy) -> str:
    cpu = {0.0: "The GPU does all attention", 1.0: "The CPU does all attention"}.get(
        s.omega, f"The CPU does {s.omega:.0%} of the attention (omega), the GPU the rest"
    )
    at_a_time = "" if s.omega == 1 else f", {counted(s.b_a, 'row')} at a time (b_a)"
    return (
        f"{counted(s.B, 'row')} in flight (B). {cpu}{at_a_time}. {_weights(model, s)} "
        f"{_copied(model, s)}"
    )


def _copied(model: mg.ModelSpec, s: mg.Strategy) -> str:
    """Which experts a decode step copies: those that do not stay, or some of them."""
    from moegen.graph.residency import residency

    there = sum(layer.n_experts for layer in model.layers)
    stay = sum(residency(model, s.s_params).experts)
    if stay == there:
        return f"All {there:,} experts stay, so none is copied."
    of = f"{stay:,} of {there:,} experts stay; of the others" if stay else "Of the experts"
    which = (
        "all are copied in each step" if s.fetch == "all" else "those are copied that get tokens"
    )
    return f"{of}, {which}."


def _prefill(model: mg.ModelSpec, s: mg.Strategy) -> str:
    waves = "one prompt at a time" if s.B == 1 else f"{s.B:,} prompts at a time, a wave"
    parts = f"; attention takes {s.b_a:,} of them at a time" if s.b_a < s.B else ""
    return f"{waves}{parts}. {_weights(model, s)}"


def _weights(model: mg.ModelSpec, s: mg.Strategy) -> str:
    from moegen.graph.residency import residency, ring_slots

    kept = residency(model, s.s_params)
    stay = (
        f"{format_bytes(kept.bytes)} of weights stay on the GPU"
        if kept.bytes
        else ("No weights stay on the GPU")
    )
    slots = ring_slots(model, s, kept)["expert_weights"]
    ahead = f", {slots} places there hold experts copied ahead" if slots else ""
    return f"{stay}{ahead}. An expert takes up to {s.b_e:,} tokens at a time (b_e)."


def _both_memories(ledgers: Mapping[str, mg.Ledger]) -> str:
    host = max(ledger.host.total_bytes for ledger in ledgers.values())
    on_gpu = " and ".join(
        f"{format_bytes(ledgers[phase].gpu.total_bytes)} in {phase}"
        for phase in ("decode", "prefill")
    )
    of = ledgers["decode"]
    return (
        f"host {format_bytes(host)} of {format_bytes(of.host.capacity_bytes)}; GPU {on_gpu}, of "
        f"{format_bytes(of.gpu.capacity_bytes)}"
    )


def simulated(run: mg.Timeline, limit: Bound, rows: int) -> Iterator[str]:
    """What was predicted of a decode step, and how busy lanes were in it."""
    shares = run.utilization()["share"]
    busy = ", ".join(f"{lane} {share:.0%}" for lane, share in shares.items())
    steps = counted(len(run.steps), "step")
    yield f"{run.name}: {steps} simulated, {counted(len(run), 'task')}"
    yield f"  lanes are busy: {busy}"
    yield (
        f"A decode step takes {format_seconds(run.period_s)} (no schedule is below "
        f"{format_seconds(limit.seconds)}, for {part(limit.binds)}): "
        f"{rows / run.period_s:.1f} tokens/s"
    )


def measuring(name: str, graph: mg.TaskGraph, steps: int, step_s: float) -> str:
    """What `moegen bench` does next, and how long that may take."""
    assert graph.shape is not None
    return (
        f"Measuring {name}: {counted(steps, 'step')} of {_brought(graph)}, about "
        f"{format_seconds(steps * step_s)} predicted ..."
    )


_SURELY_MORE = 1.02


def benched(phases: dict[str, Phase], longest: int | None = None) -> Iterator[str]:
    """What was measured of a step of each phase; ``longest`` was asked of the mixed prompts."""
    for name, phase in phases.items():
        mixed = name == "mixed prefill"
        brings = _brought(phase.graph, longest if mixed else None)
        measured = phase.measured.period_s
        uniform = phases["prefill"].tokens_per_s
        against = f", {phase.tokens_per_s / uniform - 1:+.1%} against prompts of one length"
        head = f"{name.capitalize()}: {phase.tokens_per_s:,.1f} tokens/s"
        yield head + (against if mixed else "")
        yield f"  a step     {format_seconds(measured)} for {brings}"
        # A bound is no truer than the rates that it rests on.
        slower = phase.share_of_bound > _SURELY_MORE
        yield (
            f"  bound      {format_seconds(phase.bound.seconds)} for {part(phase.bound.binds)}: "
            f"{phase.share_of_bound:.1%} of it reached"
            + (", so the rates were measured too low, on a busier machine" if slower else "")
        )
        yield (
            f"  predicted  {format_seconds(phase.predicted.period_s)}, {phase.error:+.1%} against "
            f"measured"
        )
        heads = f"{'a step':>13} {'over it':>14} {'busy':>5} {'while busy':>14} {'rated':>14}"
        yield f"  {'':17} {heads}"
        for r in phase.reached:
            over, busy, rate = (f"{_si(x)}{r.unit}/s" for x in (r.per_s, r.busy_per_s, r.rate))
            each = f"{_si(r.per_step)}{r.unit}"
            yield f"  {r.name:17} {each:>13} {over:>14} {r.busy_share:>5.0%} {busy:>14} {rate:>14}"


def _brought(graph: mg.TaskGraph, longest: int | None = None) -> str:
    """What a step brings; why no prompt is of the ``longest`` length, where it has no room."""
    shape = graph.shape
    assert shape is not None
    if graph.phase == "decode":
        return counted(shape.tokens, "row")
    least, most = min(shape.new), max(shape.new)
    lengths = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    prompts = f"{counted(shape.rows, 'prompt')} of {lengths}"
    room = ""
    if longest is not None and shape.tokens < longest:
        tokens = counted(shape.tokens, "token")
        room = f": a wave of {tokens} has no room for one of {longest:,}"
    return f"{counted(shape.tokens, 'prompt token')}, {prompts}{room}"


def _si(n: float) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:,.1f} {prefix}"
    return f"{n / 1e3:.1f} k"
