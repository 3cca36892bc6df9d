"""Kernels of the BULK, KV and ACT lanes: what crosses between host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moegen.exec.program import Program
    from moegen.exec.step import Step
    from moegen.graph.task import Task


def copy_rows(p: Program, task: Task, index: int, step: Step) -> None:
    n = step.table.numel()
    p.buffers.host_rows[:n].copy_(step.table)
    p.transfer.up(p.buffers.rows[p.slot("rows", task, index), :n], p.buffers.host_rows[:n])
    p.columns(step, index)  # here, and not in whichever op comes first


def copy_dense(p: Program, task: Task, index: int, step: Step) -> None:
    blob = p.machinery.weights.dense[task.id.layer]
    slot = p.buffers.dense[p.slot("dense_weights", task, index)]
    p.transfer.bulk(slot[: blob.numel()], blob)


def copy_expert(p: Program, task: Task, index: int, step: Step) -> None:
    layer = task.id.layer
    blobs = p.machinery.weights.experts[layer]
    assert blobs is not None
    slot = p.buffers.expert[p.slot("expert_weights", task, index)]
    for place, expert in p.copied_experts(task, step):
        p.transfer.bulk(p.expert_place(slot, layer, place), blobs[expert])


def send_qkv(p: Program, task: Task, index: int, step: Step) -> None:
    n, slot = step.cpu.rows, p.slot("qkv", task, index)
    p.transfer.down(p.buffers.host_q[:n], p.buffers.q[slot, :n])
    p.transfer.down(p.buffers.host_new_kv[:n], p.buffers.new_kv[slot, :n])


def recv_attn(p: Program, task: Task, index: int, step: Step) -> None:
    n = step.cpu.rows
    out = p.buffers.attn_out[p.slot("attn_out", task, index)]
    p.transfer.up(out[:n], p.buffers.host_attn[:n])


def append_kv(p: Program, task: Task, index: int, step: Step) -> None:
    # A wave's micro-batch begins its staging slot; a decode step stages the CPU's rows first.
    whole = task.id.microbatch < 0
    span = step.gpu if whole else p.span(task, step)
    at = span.t0 if whole else 0
    new = p.buffers.new_kv[p.slot("qkv", task, index), at : at + span.tokens]
    where = p.columns(step, index)["kv_index"][span.t0 : span.t1]
    p.transfer.scatter(p.store.layers[task.id.layer], new, where)


def fetch_kv(p: Program, task: Task, index: int, step: Step) -> None:
    slot = p.buffers.kv[p.slot("kv", task, index)]
    p.transfer.gather(slot, p.store.layers[task.id.layer], *p.history(task, step, index))


def copy_counts(p: Program, task: Task, index: int, step: Step) -> None:
    n = p.model.layers[task.id.layer].n_experts
    counts = p.buffers.counts[p.slot("counts", task, index)]
    p.transfer.down(p.buffers.host_counts[:n], counts[:n])


def copy_tokens(p: Program, task: Task, index: int, step: Step) -> None:
    n = step.n_rows
    tokens = p.buffers.tokens[p.slot("tokens", task, index)]
    p.transfer.down(p.buffers.host_tokens[:n], tokens[:n])
    if p.keep_logits:
        logits = p.buffers.logits[p.slot("logits", task, index)]
        p.transfer.down(p.buffers.host_logits[:n], logits[:n])
