"""The closed vocabulary of operations: the lane of each, and how much work it is.

Shape legend: T new tokens of the step, R live rows, H hidden size, E experts, k experts
a token, C tokens of history. Weights count once a kernel, however many tokens use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moegen.graph.model import Layer
from moegen.graph.model import Part as Weights
from moegen.graph.shape import Part, Sizes
from moegen.graph.task import NO_WORK, Lane, TaskId, Work

WorkFn = Callable[[Sizes, TaskId], Work]


@dataclass(frozen=True)
class Op:
    """An operation: where it queues, what it does in a sentence, its work.

    ``host_reads`` marks ops that need a value on the host before they can be issued.
    """

    name: str
    lane: Lane
    does: str
    work: WorkFn
    host_reads: bool = False


OPS: dict[str, Op] = {}


def _op(
    name: str, lane: Lane, does: str, *, host_reads: bool = False
) -> Callable[[WorkFn], WorkFn]:
    def register(fn: WorkFn) -> WorkFn:
        OPS[name] = Op(name, lane, does, fn, host_reads)
        return fn

    return register


def expert_range(n_experts: int, resident: int, group: int, first: int) -> range:
    """Experts of the task whose group starts at ``first``: groups never mix residency."""
    end = resident if first < resident else n_experts
    return range(first, min(first + group, end))


def task_experts(z: Sizes, t: TaskId) -> Sequence[int]:
    """Experts that an ``expert`` or ``copy_expert`` task stands for at this step."""
    group = z.strategy.expert_group
    if z.strategy.fetch == "routed":
        return z.ranked_experts(t.layer)[t.expert : t.expert + group]
    resident = z.residency.experts[t.layer]
    return expert_range(z.layer(t).n_experts, resident, group, t.expert)


def _matmul(
    z: Sizes, tokens: int, weights: Weights, io: float, rows: int, launches: int = 1
) -> Work:
    """Products of ``tokens`` rows with ``weights``, which each launch reads anew."""
    if tokens == 0:
        return NO_WORK
    weight_bytes = launches * (weights.bytes + weights.scale_bytes)
    return Work(
        flops=2.0 * tokens * weights.params,
        gpu_bytes=weight_bytes + io * z.model.act_bytes,
        tokens=tokens,
        rows=rows,
        launches=launches,
    )


@_op("copy_rows", Lane.ACT, "the step's row table goes up", host_reads=True)
def _copy_rows(z: Sizes, t: TaskId) -> Work:
    nbytes = 8 * (3 * z.all.tokens + 5 * z.all.rows)
    return Work(h2d_bytes=nbytes, tokens=z.all.tokens, rows=z.all.rows) if nbytes else NO_WORK


@_op("embed", Lane.GPU, "token ids to hidden states [T, H]")
def _embed(z: Sizes, t: TaskId) -> Work:
    n = z.all.tokens
    io = 2.0 * n * z.model.hidden * z.model.act_bytes
    return Work(gpu_bytes=io, tokens=n, rows=z.all.rows) if n else NO_WORK


@_op("copy_dense", Lane.BULK, "a layer's dense weights to their slot")
def _copy_dense(z: Sizes, t: TaskId) -> Work:
    return Work(h2d_bytes=z.layer(t).dense_bytes)


@_op("pre_attn", Lane.GPU, "norm, query and KV projections, rotary position")
def _pre_attn(z: Sizes, t: TaskId) -> Work:
    layer, part = z.layer(t), z.part(t)
    a, n = layer.attention, part.tokens
    io = n * (z.model.hidden + a.q_width(z.phase) + a.kv_width)
    return _matmul(z, n, layer.pre, io, part.rows)


@_op("send_qkv", Lane.ACT, "queries and new KV of the CPU's rows go down")
def _send_qkv(z: Sizes, t: TaskId) -> Work:
    a = z.layer(t).attention
    nbytes = z.cpu.rows * (a.q_width(z.phase) + a.kv_width) * z.model.act_bytes
    return Work(d2h_bytes=nbytes, tokens=z.cpu.tokens, rows=z.cpu.rows) if nbytes else NO_WORK


def _decode_attention(z: Sizes, layer: Layer, part: Part) -> tuple[float, float, int]:
    """FLOPs, KV bytes, and runs of rows of one length, of decode attention over ``part``."""
    a = layer.attention
    flops, span = a.decode_flops(part.contexts), a.kv_span(part.contexts)
    runs = 1 + int(np.count_nonzero(np.diff(span)))
    return int(flops.sum()), int(span.sum()) * a.kv_width * z.model.act_bytes, runs


@_op("attn_cpu", Lane.CPU, "new KV into the store, then decode attention of the CPU's rows")
def _attn_cpu(z: Sizes, t: TaskId) -> Work:
    if z.cpu.rows == 0:
        return NO_WORK
    flops, nbytes, calls = _decode_attention(z, z.layer(t), z.cpu)
    return Work(flops=flops, host_bytes=nbytes, tokens=z.cpu.tokens, rows=z.cpu.rows, calls=calls)


@_op("recv_attn", Lane.ACT, "attention output of the CPU's rows goes up")
def _recv_attn(z: Sizes, t: TaskId) -> Work:
    nbytes = z.cpu.rows * z.layer(t).attention.out_width(z.phase) * z.model.act_bytes
    return Work(h2d_bytes=nbytes, tokens=z.cpu.tokens, rows=z.cpu.rows) if nbytes else NO_WORK


@_op("append_kv", Lane.KV, "new KV of the GPU's rows into the host store")
def _append_kv(z: Sizes, t: TaskId) -> Work:
    part = z.part(t) if z.phase == "prefill" else z.gpu_rows
    nbytes = part.tokens * z.layer(t).attention.kv_width * z.model.act_bytes
    return Work(d2h_bytes=nbytes, tokens=part.tokens, rows=part.rows) if nbytes else NO_WORK


@_op("fetch_kv", Lane.KV, "a micro-batch's history from the host store to its slot")
def _fetch_kv(z: Sizes, t: TaskId) -> Work:
    part, layer = z.part(t), z.layer(t)
    tokens = int(layer.attention.kv_span(part.contexts).sum()) - part.rows
    nbytes = tokens * layer.attention.kv_width * z.model.act_bytes
    return Work(h2d_bytes=nbytes, tokens=tokens, rows=part.rows) if nbytes else NO_WORK


@_op("attn_gpu", Lane.GPU, "decode attention of a micro-batch over its slot")
def _attn_gpu(z: Sizes, t: TaskId) -> Work:
    part = z.part(t)
    if part.rows == 0:
        return NO_WORK
    flops, nbytes, calls = _decode_attention(z, z.layer(t), part)
    return Work(flops=flops, gpu_bytes=nbytes, tokens=part.tokens, rows=part.rows, calls=calls)


@_op("attn_prefill", Lane.GPU, "causal attention of a micro-batch's prompts")
def _attn_prefill(z: Sizes, t: TaskId) -> Work:
    part, a = z.part(t), z.layer(t).attention
    if part.rows == 0:
        return NO_WORK
    io = part.tokens * (a.q_width(z.phase) + a.kv_width + a.out_width(z.phase))
    return Work(
        flops=int(a.prefill_flops(part.new).sum()),
        gpu_bytes=io * z.model.act_bytes,
        tokens=part.tokens,
        rows=part.rows,
    )


@_op("post_attn", Lane.GPU, "output projection, residual, norm")
def _post_attn(z: Sizes, t: TaskId) -> Work:
    layer, part = z.layer(t), z.part(t)
    n = part.tokens
    io = n * (3 * z.model.hidden + layer.attention.out_width(z.phase))
    return _matmul(z, n, layer.post, io, part.rows)


@_op("route", Lane.GPU, "the k experts of each token, b_e at a time, and all in expert order")
def _route(z: Sizes, t: TaskId) -> Work:
    layer, n = z.layer(t), z.all.tokens
    io = n * (z.model.hidden + layer.n_experts)
    return _matmul(z, n, layer.router, io, z.all.rows, z.tiles(n))


@_op("copy_counts", Lane.ACT, "tokens per expert go down; the host waits for them")
def _copy_counts(z: Sizes, t: TaskId) -> Work:
    return Work(d2h_bytes=8 * z.layer(t).n_experts) if z.all.tokens else NO_WORK


@_op("shared_expert", Lane.GPU, "the experts every token takes, b_e tokens at a time")
def _shared_expert(z: Sizes, t: TaskId) -> Work:
    layer, n = z.layer(t), z.all.tokens
    io = n * (2 * z.model.hidden + 3 * layer.shared_intermediate)
    return _matmul(z, n, layer.shared, io, z.all.rows, z.tiles(n))


@_op("dense_mlp", Lane.GPU, "the MLP of a layer without experts, b_e tokens at a time")
def _dense_mlp(z: Sizes, t: TaskId) -> Work:
    layer, n = z.layer(t), z.all.tokens
    io = n * (3 * z.model.hidden + 3 * layer.dense_intermediate)
    return _matmul(z, n, layer.dense_mlp, io, z.all.rows, z.tiles(n))


@_op("copy_expert", Lane.BULK, "one expert's weights, or a group's, to their slot", host_reads=True)
def _copy_expert(z: Sizes, t: TaskId) -> Work:
    experts, passing = task_experts(z, t), 1.0
    if z.strategy.fetch == "routed":
        resident = z.residency.experts[t.layer]
        if z.tokens_are_given(t.layer):
            experts = [e for e in experts if e >= resident]
        else:  # any may be chosen, those that stay no more often than others: the mean
            passing = 1 - resident / z.layer(t).n_experts
    if not experts or not passing:
        return NO_WORK
    expert = z.layer(t).expert
    nbytes = len(experts) * (expert.bytes + expert.scale_bytes) * passing
    return Work(h2d_bytes=nbytes, launches=len(experts))


@_op("expert", Lane.GPU, "an expert's MLP over its tokens, b_e at a time", host_reads=True)
def _expert(z: Sizes, t: TaskId) -> Work:
    layer, counts = z.layer(t), z.expert_tokens(t.layer)
    used = [counts[e] for e in task_experts(z, t) if counts[e]]
    n = sum(used)
    tiles = sum(-(-c // z.strategy.b_e) for c in used)
    io = n * (2 * z.model.hidden + 3 * layer.moe_intermediate)
    return _matmul(z, n, layer.expert, io, z.all.rows, launches=tiles)


@_op("combine", Lane.GPU, "weighted sum of each token's experts, and the residual")
def _combine(z: Sizes, t: TaskId) -> Work:
    layer, n = z.layer(t), z.all.tokens
    io = n * (layer.top_k + 2 + bool(layer.shared_params)) * z.model.hidden * z.model.act_bytes
    return Work(gpu_bytes=io, tokens=n, rows=z.all.rows) if n else NO_WORK


@_op("lm_head", Lane.GPU, "logits [R, V] of each row's last token")
def _lm_head(z: Sizes, t: TaskId) -> Work:
    m, rows = z.model, z.all.rows
    weights = m.embed if m.tie_embeddings else m.lm_head
    return _matmul(z, rows, weights, rows * (m.hidden + m.vocab), rows)


@_op("sample", Lane.GPU, "the next token of each row")
def _sample(z: Sizes, t: TaskId) -> Work:
    rows = z.all.rows
    nbytes = rows * z.model.vocab * z.model.act_bytes
    return Work(gpu_bytes=nbytes, tokens=rows, rows=rows) if rows else NO_WORK


@_op("copy_tokens", Lane.ACT, "sampled tokens go down; the host learns which rows ended")
def _copy_tokens(z: Sizes, t: TaskId) -> Work:
    rows = z.all.rows
    return Work(d2h_bytes=8 * rows, tokens=rows, rows=rows) if rows else NO_WORK
