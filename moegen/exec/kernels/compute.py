"""Kernels of the GPU and CPU lanes: what is computed.

Nothing here may copy between host and device: on CUDA such a copy queues behind the
weights. Sizes come from the step, which the host knows.

What is kept from one kernel to the next lies in the program's scratch, and what one needs
meanwhile in a frame of its arena, both as `moegen.graph.working` counts them. What works token
by token takes b_e of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moegen.exec.program import Program
    from moegen.exec.step import Step
    from moegen.graph.task import Task


def _tiles(p: Program, start: int, stop: int) -> Iterator[slice]:
    """``[start, stop)`` in slices of at most b_e."""
    tile = p.strategy.b_e
    for at in range(start, stop, tile):
        yield slice(at, min(at + tile, stop))


def embed(p: Program, task: Task, index: int, step: Step) -> None:
    s, n, columns = p.scratch, step.n_tokens, p.columns(step, index)
    p.family.embed(p.machinery.head, columns["ids"], s.x[:n])
    p.family.angles(columns["pos"], s.cos[:n], s.sin[:n])
    if p.phase == "prefill":
        for m, part in enumerate(step.parts):
            ends = p.prompt_ends(m, part)
            ends[:1].zero_()
            torch.sub(columns["last"][part.r0 : part.r1], part.t0 - 1, out=ends[1:])


def pre_attn(p: Program, task: Task, index: int, step: Step) -> None:
    span, slot, s = p.span(task, step), p.slot("qkv", task, index), p.scratch
    tokens = slice(span.t0, span.t1)
    q = p.buffers.q[slot, : span.tokens]
    kv = p.buffers.new_kv[slot, : span.tokens]
    weights = p.dense(task, index)
    with p.arena.frame():
        p.family.pre_attn(
            weights, s.x[tokens], s.cos[tokens], s.sin[tokens], p.phase, q, kv, p.arena
        )


def attn_cpu(p: Program, task: Task, index: int, step: Step) -> None:
    n, layer, b = step.cpu.rows, task.id.layer, p.buffers
    p.machinery.decode.attend(
        p.family.decode_shape(layer),
        b.host_q[:n],
        b.host_new_kv[:n],
        p.store.layers[layer],
        step.start[:n],
        step.length[:n],
        b.host_attn[:n],
    )


def attn_gpu(p: Program, task: Task, index: int, step: Step) -> None:
    span, staged = p.span(task, step), p.slot("qkv", task, index)
    slot = p.buffers.kv[p.slot("kv", task, index)]
    rows = slice(span.r0, span.r1)
    _, past, starts = p.history(task, step, index)
    new_kv, q = p.buffers.new_kv[staged, rows], p.buffers.q[staged, rows]
    out = p.buffers.attn_out[p.slot("attn_out", task, index), rows]
    shape = p.family.decode_shape(task.id.layer)
    if p.machinery.device.type != "cuda":
        p.machinery.decode.attend(shape, q, new_kv, slot, starts.numpy(), past.numpy() + 1, out)
        return
    from moegen.exec.kernels.triton_attention import decode_attention

    with p.arena.frame():
        at, lengths = (p.arena.take(span.rows, dtype=torch.int64) for _ in range(2))
        slot.index_copy_(0, torch.add(starts, past, out=at), new_kv)
        decode_attention(
            q,
            slot,
            starts,
            torch.add(past, 1, out=lengths),
            out,
            p.arena,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            dk=shape.dk,
            dv=shape.dv,
            scale=shape.scale,
            latent=shape.latent,
            max_length=span.max_length,
        )


def attn_prefill(p: Program, task: Task, index: int, step: Step) -> None:
    span, staged = p.span(task, step), p.slot("qkv", task, index)
    q = p.buffers.q[staged, : span.tokens]
    kv = p.buffers.new_kv[staged, : span.tokens]
    out = p.buffers.attn_out[p.slot("attn_out", task, index), : span.tokens]
    lengths, ends = step.new[span.r0 : span.r1].tolist(), p.prompt_ends(task.id.microbatch, span)
    with p.arena.frame():
        p.family.attn_prefill(p.dense(task, index), q, kv, lengths, ends, out, p.arena)


def post_attn(p: Program, task: Task, index: int, step: Step) -> None:
    span, s = p.span(task, step), p.scratch
    tokens = slice(span.t0, span.t1)
    out = p.buffers.attn_out[p.slot("attn_out", task, index), : span.tokens]
    with p.arena.frame():
        p.family.post_attn(p.dense(task, index), out, s.x[tokens], s.h[tokens], p.phase, p.arena)


def route(p: Program, task: Task, index: int, step: Step) -> None:
    s, n, weights = p.scratch, step.n_tokens, p.dense(task, index)
    n_experts, k = p.model.layers[task.id.layer].n_experts, p.model.layers[task.id.layer].top_k
    for tile in _tiles(p, 0, n):
        with p.arena.frame():
            p.family.route(weights, s.h[tile], s.ids[tile], s.gates[tile], p.arena)
    counts = p.buffers.counts[p.slot("counts", task, index), :n_experts]
    with p.arena.frame():
        p.family.ops.sort_choices(
            s.ids[:n],
            n_experts,
            s.order[: n * k],
            s.inverse[:n],
            s.expert_ends[:n_experts],
            counts,
            p.arena,
        )


def shared_expert(p: Program, task: Task, index: int, step: Step) -> None:
    s, weights = p.scratch, p.dense(task, index)
    for tile in _tiles(p, 0, step.n_tokens):
        with p.arena.frame():
            p.family.shared_expert(weights, s.h[tile], s.shared[tile], p.arena)


def dense_mlp(p: Program, task: Task, index: int, step: Step) -> None:
    s, weights = p.scratch, p.dense(task, index)
    for tile in _tiles(p, 0, step.n_tokens):
        with p.arena.frame():
            p.family.dense_mlp(weights, s.h[tile], s.h[tile], p.arena)
        s.x[tile].add_(s.h[tile])


def expert(p: Program, task: Task, index: int, step: Step) -> None:
    s, layer = p.scratch, task.id.layer
    experts, places = p.experts(task, step), step.places(layer)
    for first, stop in _together(p, experts, step.counts[layer]):
        start, end = places[experts[first]], places[experts[stop - 1] + 1]
        if stop - first == 1:
            weights = p.expert_weights(task, index, first, experts[first])
            for tile in _tiles(p, start, end):
                with p.arena.frame():
                    h = _gathered(p, tile)
                    p.family.expert(weights, h, s.outputs[tile], p.arena)
            continue
        weights = p.stacked_weights(task, index, first, experts[first:stop])
        with p.arena.frame():
            ends = p.arena.take(stop - first, dtype=torch.int32)
            torch.sub(s.expert_ends[experts[first] : experts[stop - 1] + 1], start, out=ends)
            tile = slice(start, end)
            p.family.experts(weights, _gathered(p, tile), ends, s.outputs[tile], p.arena)


def _gathered(p: Program, tile: slice) -> torch.Tensor:
    """The hidden states of so many places in expert order."""
    order = p.scratch.order[tile]
    h = p.arena.take(len(order), p.model.hidden, dtype=p.family.dtype)
    p.family.ops.gather(p.scratch.h, order, h)
    return h


def _together(
    p: Program, experts: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Runs ``[first, stop)`` of a task's experts to compute at once; those without tokens of
    their own need not be in any.

    Experts with few tokens each cost less in one product of several matrices, many enough one by
    one. Routed experts are few, and need not be neighbours.
    """
    active = [i for i, e in enumerate(experts) if counts[e]]
    tokens = sum(counts[e] for e in experts)
    if p.strategy.fetch == "routed" or tokens >= p.grouped_below * len(active):
        yield from ((i, i + 1) for i in active)
        return
    while active:
        first, taken = active[0], 0
        run = []
        for i in active:
            taken += counts[experts[i]]
            if run and taken > p.strategy.b_e:
                break
            run.append(i)
        yield first, run[-1] + 1
        active = active[len(run) :]


def combine(p: Program, task: Task, index: int, step: Step) -> None:
    s, n, layer = p.scratch, step.n_tokens, p.model.layers[task.id.layer]
    y, shared = s.outputs[: n * layer.top_k], s.shared[:n] if layer.shared_params else None
    with p.arena.frame():
        p.family.ops.combine(s.x[:n], y, s.inverse[:n], s.gates[:n], shared, p.arena)


def lm_head(p: Program, task: Task, index: int, step: Step) -> None:
    logits = p.buffers.logits[p.slot("logits", task, index), : step.n_rows]
    with p.arena.frame():
        rows = p.arena.take(step.n_rows, p.model.hidden, dtype=p.family.dtype)
        torch.index_select(p.scratch.x, 0, p.columns(step, index)["last"], out=rows)
        p.family.logits(p.machinery.head, rows, logits)


def sample(p: Program, task: Task, index: int, step: Step) -> None:
    logits = p.buffers.logits[p.slot("logits", task, index), : step.n_rows]
    tokens = p.buffers.tokens[p.slot("tokens", task, index), : step.n_rows]
    torch.argmax(logits, dim=-1, out=tokens)
