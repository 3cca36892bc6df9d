"""Kernels of the GPU and CPU lanes: what is computed.

Nothing here may copy between host and device: on CUDA such a copy queues behind the
weights. Sizes come from the step, which the host knows.

What is kept from one kernel to the next is let go of by the last that reads it, and what
works token by token takes b_e of them at once: `moegen.graph.working` counts on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moegen.exec.program import Program
    from moegen.exec.step import Step
    from moegen.graph.task import Task


NOTHING = torch.empty(0)


def _tiles(p: Program, start: int, stop: int) -> Iterator[slice]:
    """``[start, stop)`` in slices of at most b_e."""
    tile = p.strategy.b_e
    for at in range(start, stop, tile):
        yield slice(at, min(at + tile, stop))


def embed(p: Program, task: Task, index: int, step: Step) -> None:
    s = p.scratch
    s.x = p.family.embed(p.machinery.head, p.columns(step, index)["ids"])
    s.h = torch.empty_like(s.x)


def pre_attn(p: Program, task: Task, index: int, step: Step) -> None:
    span, slot = p.span(task, step), p.slot("qkv", task, index)
    pos = p.columns(step, index)["pos"][span.t0 : span.t1]
    x = p.scratch.x[span.t0 : span.t1]
    q, kv = p.family.pre_attn(p.dense(task, index), x, pos, p.phase)
    p.buffers.q[slot, : span.tokens].copy_(q)
    p.buffers.new_kv[slot, : span.tokens].copy_(kv)


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
    shape, length = p.family.decode_shape(task.id.layer), past + 1
    if p.machinery.device.type == "cuda":
        from moegen.exec.kernels.triton_attention import decode_attention

        slot.index_copy_(0, starts + past, new_kv)
        decode_attention(
            q,
            slot,
            starts,
            length,
            out,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            dk=shape.dk,
            dv=shape.dv,
            scale=shape.scale,
            latent=shape.latent,
            max_length=span.max_length,
        )
        return
    p.machinery.decode.attend(shape, q, new_kv, slot, starts.numpy(), length.numpy(), out)


def attn_prefill(p: Program, task: Task, index: int, step: Step) -> None:
    span, staged = p.span(task, step), p.slot("qkv", task, index)
    q = p.buffers.q[staged, : span.tokens]
    kv = p.buffers.new_kv[staged, : span.tokens]
    lengths = step.new[span.r0 : span.r1].tolist()
    out = p.family.attn_prefill(p.dense(task, index), q, kv, lengths)
    p.buffers.attn_out[p.slot("attn_out", task, index), : span.tokens].copy_(out)


def post_attn(p: Program, task: Task, index: int, step: Step) -> None:
    span, s = p.span(task, step), p.scratch
    tokens = slice(span.t0, span.t1)
    out = p.buffers.attn_out[p.slot("attn_out", task, index), : span.tokens]
    x, h = p.family.post_attn(p.dense(task, index), out, s.x[tokens], p.phase)
    s.x[tokens] = x
    s.h[tokens] = h


def route(p: Program, task: Task, index: int, step: Step) -> None:
    s, layer, weights = p.scratch, p.model.layers[task.id.layer], p.dense(task, index)
    n_experts, k = layer.n_experts, layer.top_k
    ids = torch.empty((step.n_tokens, k), dtype=torch.int64, device=s.h.device)
    s.gates = torch.empty((step.n_tokens, k), dtype=torch.float32, device=s.h.device)
    for tile in _tiles(p, 0, step.n_tokens):
        ids[tile], s.gates[tile] = p.family.route(weights, s.h[tile])
    # Stable, so that each expert takes its tokens in order: results do not depend on timing.
    chosen, order = torch.sort(ids.reshape(-1), stable=True)
    places = torch.arange(order.numel(), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    s.order, s.inverse = order // k, inverse.view(-1, k)
    bounds = torch.searchsorted(chosen, torch.arange(n_experts + 1, device=chosen.device))
    p.buffers.counts[p.slot("counts", task, index), :n_experts] = bounds.diff()
    s.outputs = torch.empty((order.numel(), s.h.shape[1]), dtype=s.h.dtype, device=s.h.device)


def shared_expert(p: Program, task: Task, index: int, step: Step) -> None:
    s, weights = p.scratch, p.dense(task, index)
    s.shared = torch.empty_like(s.h)
    for tile in _tiles(p, 0, step.n_tokens):
        s.shared[tile] = p.family.shared_expert(weights, s.h[tile])


def dense_mlp(p: Program, task: Task, index: int, step: Step) -> None:
    s, weights = p.scratch, p.dense(task, index)
    for tile in _tiles(p, 0, step.n_tokens):
        s.x[tile] += p.family.dense_mlp(weights, s.h[tile])


def expert(p: Program, task: Task, index: int, step: Step) -> None:
    s, counts = p.scratch, step.counts[task.id.layer]
    for place, e in enumerate(p.experts(task, step)):
        first = sum(counts[:e])
        weights = p.expert_weights(task, index, place, e) if counts[e] else {}
        for tile in _tiles(p, first, first + counts[e]):
            s.outputs[tile] = p.family.expert(weights, s.h.index_select(0, s.order[tile]))


def combine(p: Program, task: Task, index: int, step: Step) -> None:
    s = p.scratch
    for tile in _tiles(p, 0, step.n_tokens):
        shared = None if s.shared is None else s.shared[tile]
        s.x[tile] = p.family.combine(s.x[tile], s.outputs, s.inverse[tile], s.gates[tile], shared)
    s.outputs = s.order = s.inverse = s.gates = NOTHING
    s.shared = None


def lm_head(p: Program, task: Task, index: int, step: Step) -> None:
    s = p.scratch
    last = p.columns(step, index)["last"]
    s.logits = p.family.logits(p.machinery.head, s.x.index_select(0, last))
    s.x = s.h = NOTHING
    if p.keep_logits:
        p.buffers.logits[p.slot("logits", task, index), : step.n_rows].copy_(s.logits)


def sample(p: Program, task: Task, index: int, step: Step) -> None:
    tokens = p.buffers.tokens[p.slot("tokens", task, index)]
    tokens[: step.n_rows] = p.scratch.logits.argmax(-1)
    p.scratch.logits = NOTHING
