"""The full profile: this machine's kernels and copies, op by op, as the table that a cost model
reads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moegen.errors import InvalidInput
from moegen.exec import rates
from moegen.exec.bulk import bulk_copies
from moegen.exec.company import company
from moegen.exec.engine import Engine
from moegen.exec.families import family_for
from moegen.exec.lanes import forget_gpu_memory
from moegen.exec.loading import checked_device
from moegen.exec.neighbours import Neighbours
from moegen.exec.op_bench import Timed, op_bench
from moegen.exec.op_curves import curves
from moegen.exec.op_points import (
    CROWDED_OPS,
    MOST_BYTES,
    MOST_CPU_BYTES,
    Agenda,
    Point,
    decode_points,
    prefill_points,
    profiled_layers,
)
from moegen.exec.profile import machine_profile
from moegen.exec.program import Machinery
from moegen.exec.rests import MOST_TRIED
from moegen.exec.synthetic import MadeUpKV
from moegen.exec.timing import Bench
from moegen.exec.told import Told, as_in_steps, latencies_of
from moegen.graph.checks import number
from moegen.graph.curve import Curve
from moegen.graph.hardware import HardwareSpec
from moegen.graph.host_memory import free_bytes
from moegen.graph.model import ModelSpec
from moegen.graph.peaks import uses
from moegen.graph.profile_table import BUDGET_S, DTYPES, ProfileTable
from moegen.units import format_bytes

#: Whose widths are measured unless others are named.
CUDA_MODELS = ("mixtral-8x7b", "deepseek-v2-lite")
# The demo's: SmolLM2-135M, its MLP in every expert.
_DEMO = {
    "model_type": "mixtral",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}
# Of a model's time, for decode steps. They come first: after waves of prompts a GPU is hot.
_DECODE_SHARE = 0.6
# What one measurement lasts, and what a task may take before larger ones are left out.
_SPAN_S, _LONGEST_S = 0.015, 0.25
# What is so many bytes and nothing else, whichever model it is of.
_ALIKE = frozenset({"copy_dense", "copy_expert", "copy_rows", "copy_tokens"})
# For company.
_REST_S = 6.0
# KV of made-up rows takes no more than this share of the host memory that is free.
_KV_SHARE = 0.6
# A point whose runs differ by more than this part of what they take says little.
_UNSURE = 1.0
# What is so much over the time that there was is told.
_OVER_S = 2.0
_PACKAGES = ("torch", "triton")

Say = Callable[[str], None]


def measure_table(
    models: Sequence[ModelSpec],
    device: torch.device,
    dtype: torch.dtype,
    *,
    budget_s: float = BUDGET_S,
    say: Say = lambda _: None,
    notes: list[str] | None = None,
) -> ProfileTable:
    """Measure this machine's kernels and copies at the widths of some models.

    Every op is timed over a grid of tokens, of rows and context, or of bytes: within steps that
    an executor runs, where that can be told, else by itself as an executor runs it, on the lane
    that it belongs to; then lanes beside one another. What takes longer than a quarter of a second
    is not measured at larger sizes, which then follow the roofline.

    Parameters
    ----------
    models : sequence of ModelSpec
        Whose widths; a few layers of each are made up.
    device : torch.device
    dtype : torch.dtype
        Of weights and KV.
    budget_s : float
        Points that would take longer are left out, and noted; but each op is measured at one
        point at least, and what that takes beyond the budget is noted too.
    say : callable
        Hears what is being measured.
    notes : list of str, optional
        Gets a line for everything that was left out, and one if others used the cores meanwhile.

    Raises
    ------
    InvalidInput
        If there is no model, one is of a family that cannot be run, or ``budget_s`` is no time.
    Infeasible
        If host memory cannot hold the layers.
    """
    if not models:
        raise InvalidInput("a profile needs a model whose widths to measure: name at least one")
    budget_s = number(budget_s, "budget_s", above=0)
    most_bytes = MOST_BYTES if device.type == "cuda" else MOST_CPU_BYTES
    parts = [profiled_layers(m.with_(dtype=rates.dtype_name(dtype)), most_bytes) for m in models]
    for part in parts:  # before anything is measured
        family_for(part, dtype, device)
    began, notes = time.perf_counter(), [] if notes is None else notes
    on_gpu = device.type == "cuda"
    neighbours = Neighbours()
    say("rates of the machine")
    machine = machine_profile(device, dtype, fresh=True)
    say("copies by size")
    alike = list(bulk_copies(device, _SPAN_S))  # whichever model's they are
    measured: list[tuple[str, list[Timed]]] = []  # by model: how, and what
    told: list[Told] = []
    last_s = began + budget_s - _REST_S
    for i, (whole, model) in enumerate(zip(models, parts, strict=True)):
        now = time.perf_counter()
        until_s = now + max(0.0, last_s - now) / (len(parts) - i)
        of = f"the first {model.n_layers} of " if model.n_layers < whole.n_layers else ""
        say(f"{model.name}, {of}{whole.n_layers} layer{'' if whole.n_layers == 1 else 's'}")
        with (
            Engine.random(
                model, device=str(device), dtype=rates.dtype_name(dtype), hardware=machine
            ) as engine,
            MadeUpKV(engine.machinery) as kv,
        ):
            decode_s = now + _DECODE_SHARE * (until_s - now)
            agendas = [
                Agenda(decode_points(model, on_gpu=on_gpu), decode_s),
                Agenda(prefill_points(model, on_gpu=on_gpu), until_s),
            ]
            told.append(Told(float(machine.cpu_attn_bytes_per_s)))
            timed = [
                t
                for agenda in agendas
                for t in _timed(engine.machinery, kv, agenda, told[-1], notes)
            ]
            kind = engine.cpu_attention
        source = f"measured: the executor's kernels at the widths of {model.name}, {kind}"
        if late := [point for agenda in agendas for point in agenda.late]:
            grids = ", ".join(dict.fromkeys(point.grid for point in late))
            notes.append(
                f"{model.name}: there was no time left for {len(late)} "
                f"point{'s' * (len(late) > 1)} ({grids}): the roofline goes on from what was "
                f"measured"
            )
        measured.append((source, timed))
    waits = latencies_of(told, on_gpu=on_gpu)
    if MOST_TRIED in (waits.rested_issue, waits.rested_turn):
        notes.append(
            f"a rest may cost the issuing thread more than was tried, {MOST_TRIED:g} times a task "
            f"for each unit of cold"
        )
    found: list[Curve] = []
    handed = [of.handed_over(waits) for of in told]
    for (source, timed), of_thread in zip(measured, handed, strict=True):
        alike += [t for t in timed if t.task.id.op in _ALIKE]
        others = [t for t in timed if t.task.id.op not in _ALIKE]
        found += curves(others, of_thread, source)
    names = ", ".join(model.name for model in parts)
    source = f"measured: the executor's copies, of weights and tables of {names}"
    found += curves(alike, itertools.chain(*handed), source)
    say("lanes beside one another")
    beside = as_in_steps(company(device, dtype), told)
    if on_gpu:
        forget_gpu_memory(device)
    took_s = time.perf_counter() - began
    if took_s > budget_s + _OVER_S:
        notes.append(
            f"it took {took_s:.0f} s, not {budget_s:g} s: rates, lanes beside one another and one "
            f"size of each operation are measured whatever time there is"
        )
    notes += [note for note in (_unsure(found), neighbours.note()) if note is not None]
    return ProfileTable(
        # Each op's host code is measured: one number for all of them would count it twice.
        machine=replace(_as_fast_as_seen(machine, found), task_s=None),
        date=time.strftime("%Y-%m-%d"),
        versions=_versions(),
        dtype=rates.dtype_name(dtype),
        curves=tuple(_distinct(found)),
        peaks={},
        company=tuple(beside),
        latencies=waits,
    )


def demo_widths() -> ModelSpec:
    """A model of the demo checkpoint's widths."""
    return ModelSpec.from_config(_DEMO, "demo-moe")


def _timed(
    machinery: Machinery, kv: MadeUpKV, agenda: Agenda, told: Told, notes: list[str]
) -> Iterator[Timed]:
    model = machinery.family.spec
    with Bench(machinery.device) as bench:
        for point in agenda:
            if short := _short_of_memory(point, model, kv):
                agenda.too_large(point)
                notes.append(f"{model.name}: {short}, and larger ones were left out")
                continue
            try:
                # In a function of its own: its buffers are gone before the next point makes some.
                for timed in _of_point(point, machinery, kv, bench, told):
                    if timed.seconds > _LONGEST_S:
                        agenda.too_large(point)
                    yield timed
            except torch.OutOfMemoryError:
                agenda.too_large(point)
                notes.append(
                    f"{model.name}: {point.grid} of {point.size} tokens does not fit the GPU's "
                    f"memory, and larger ones were left out"
                )


def _short_of_memory(point: Point, model: ModelSpec, kv: MadeUpKV) -> str:
    """Why the KV of a point's rows does not fit host memory; empty if it does."""
    need, there = point.size * model.kv_bytes_per_token, kv.nbytes
    if need <= there:
        return ""
    # What is there is given back first.
    most = int(_KV_SHARE * (free_bytes()[0] + there))
    if need <= most:
        return ""
    return (
        f"{point.grid} of {point.size} tokens needs {format_bytes(need)} of KV, and no more than "
        f"{format_bytes(most)} is taken, {_KV_SHARE:.0%} of the host memory that is free"
    )


def _of_point(
    point: Point, machinery: Machinery, kv: MadeUpKV, bench: Bench, told: Told
) -> Iterator[Timed]:
    uncached = "attn_cpu" in point.ops
    ops = op_bench(point.graph, machinery, kv, bench, steps=point.steps, uncached=uncached)
    told.add(ops, point.tells)
    for op in point.ops:
        yield from ops.time(op, _SPAN_S, point.crowd and op in CROWDED_OPS)


def _distinct(found: Sequence[Curve]) -> list[Curve]:
    """One curve of each op, phase and place: of models that share a width, the first."""
    seen: set[Any] = set()
    kept = []
    for c in found:
        key = c.ops, c.phase, tuple(tuple(v) for v in c.axes.values())
        if key not in seen:
            seen.add(key)
            kept.append(c)
    return kept


def _unsure(found: Sequence[Curve]) -> str | None:
    """Which points say little, for a person; None if there are none."""
    # A point that several grids share counts once.
    far = {
        f"{c.describe(index)}{f' in {c.phase}' if c.phase else ''}": spread
        for c in found
        for index in np.ndindex(np.shape(c.seconds))
        if (spread := float(np.asarray(c.spread)[index])) > _UNSURE
    }
    if not far:
        return None
    where, spread = max(far.items(), key=lambda x: x[1])
    others = f", and so at {len(far) - 1} more" if len(far) > 1 else ""
    return (
        f"what {where} took differs from run to run by {spread:.1f} times that{others}: something "
        f"else was at work, and predictions that rest on it may be far off; measure again"
    )


def _as_fast_as_seen(machine: HardwareSpec, found: Sequence[Curve]) -> HardwareSpec:
    """The machine, its arithmetic as fast as the fastest kernel that was measured."""
    best = machine.gpu_flops
    for c in found:
        if "attn_cpu" in c.ops:
            continue
        for _, at, seconds in c.points():
            flops = sum(units for what, _, units in uses(at) if what == "flops")
            best = max(best, flops / seconds)
    if best == machine.gpu_flops:
        return machine
    share = machine.gpu_flops / best
    efficiency = tuple((n, e * share) for n, e in machine.gpu_efficiency)
    how = "measured: the fastest kernel of the profile"
    source = dict(machine.source) | {"gpu_flops": how}
    return replace(machine, gpu_flops=best, gpu_efficiency=efficiency, source=source)


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for package in _PACKAGES[1:]:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def profile(
    models: Sequence[ModelSpec | str | Path] | ModelSpec | str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    budget_s: float = BUDGET_S,
    on_progress: Say = lambda _: None,
    notes: list[str] | None = None,
) -> ProfileTable:
    """Measure this machine: the table that `CostModel.from_profile` reads.

    Kernels over tokens, rows and context, copies and zero-copy by size and direction, and what
    lanes take from each other: everything that plans and predictions for this machine rest on.

    Parameters
    ----------
    models : ModelSpec, str, path or several of them, optional
        Whose widths to measure, by name, folder or spec. mixtral-8x7b and deepseek-v2-lite on
        CUDA; on CPU lanes a Mixtral of the demo's widths.
    device : {"cpu", "cuda"}, optional
        CUDA if there is one.
    dtype : {"float32", "bfloat16", "float16"}, optional
        bfloat16 on CUDA, float32 on CPU lanes.
    budget_s : float
        Seconds it may take, about. What there is no time for is left out, and noted.
    on_progress : callable
        Hears in words what is being measured.
    notes : list of str, optional
        Gets a line for everything that was left out, and one if others used the cores meanwhile.

    Returns
    -------
    ProfileTable
        ``save`` it to a file.

    Raises
    ------
    InvalidInput
        If a model or dtype is unknown, a model is of a family that cannot be run, ``budget_s`` is
        no time, ``on_progress`` cannot be called or ``notes`` is no list.
    Infeasible
        If host memory cannot hold a few layers of a model.
    MachineError
        If the device cannot be used.
    """
    if not callable(on_progress):
        raise InvalidInput(f"on_progress must be callable with a line of text, got {on_progress!r}")
    if not (notes is None or isinstance(notes, list)):
        raise InvalidInput(f"notes must be a list, to which lines are added, got {notes!r}")
    on = checked_device(device)
    if models is None:
        models = CUDA_MODELS if on.type == "cuda" else (demo_widths(),)
    elif isinstance(models, (str, Path, ModelSpec)):
        models = (models,)
    elif not isinstance(models, Sequence):
        raise InvalidInput(f"models must be models or their names, got {models!r}")
    specs = [m if isinstance(m, ModelSpec) else ModelSpec.from_pretrained(m) for m in models]
    name = dtype or ("bfloat16" if on.type == "cuda" else "float32")
    if name not in DTYPES:
        raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return measure_table(
        specs, on, getattr(torch, name), budget_s=budget_s, say=on_progress, notes=notes
    )
