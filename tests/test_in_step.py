"""What a step tells of its tasks: which of those that ran count."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import mixtral

import moegen as mg
from moegen.exec.in_step import InStep
from moegen.exec.issue import Times
from moegen.graph.task import Lane

MODEL = mixtral()
NOTHING = ([], [], [])


@pytest.fixture(scope="module")
def graph():
    s = mg.Strategy(B=8, b_a=4, b_e=64, omega=0.5, s_expert=4 * MODEL.expert_bytes)
    return mg.build(MODEL, s, kv_len=16)


def first(g, op):
    return next(t for t in g if t.id.op == op)


def ran(task, start_s, seconds, *, issued_s=0.0, step=2):
    """A task that was handed over from 0 to ``issued_s``."""
    return Times(task.id._replace(step=step), start_s, start_s + seconds, 0.0, 0.0, issued_s)


def test_a_kernel_counts_if_it_was_launched_before_its_turn_came(graph):
    task = first(graph, "pre_attn")
    times = [
        ran(task, 1.0, 0.5, issued_s=1.0, step=2),
        ran(task, 2.0, 0.7, issued_s=2.1, step=3),  # begun while it was being launched
        ran(task, 3.0, 0.25, issued_s=2.9, step=4),
    ]
    assert InStep(graph, times).spans([task]) == ([0.5, 0.25], [], [])
    assert InStep(graph, times[:2]).spans([task]) == NOTHING  # of one nothing can be said


def test_all_tasks_of_a_kind_count_and_empty_ones_do_not(graph):
    a, b = [t for t in graph if t.id.op == "post_attn"][:2]
    times = [ran(a, 1.0, 0.5), ran(b, 2.0, 0.25), ran(b, 3.0, 0.0)]
    assert InStep(graph, times).spans([a, b]) == ([0.5, 0.25], [], [])
    assert InStep(graph, times).spans([first(graph, "route")]) == NOTHING


@pytest.mark.parametrize("op", ["attn_cpu", "fetch_kv", "append_kv"])
def test_copies_of_weights_count_where_host_memory_is_theirs(graph, op):
    copy, other = first(graph, "copy_expert"), first(graph, op)
    assert other.lane in (Lane.CPU, Lane.KV)
    times = [
        ran(copy, 0.0, 1.0, issued_s=0.5),  # handed over while it ran: it is one launch
        ran(copy, 1.0, 2.0),  # beside the other for a twentieth of the time
        ran(copy, 3.0, 1.25),
        ran(copy, 5.0, 1.0),  # beside it for a hundredth
        ran(other, 1.9, 0.1),
        ran(other, 5.99, 0.3),
        ran(other, 3.5, 0.0),  # had nothing to do
    ]
    assert InStep(graph, times).spans([copy]) == ([1.0, 1.25, 1.0], [], [])


def test_kernels_beside_fetched_kv_are_apart_from_those_alone(graph):
    """Those that are neither nearly alone nor nearly all the time beside it are no use."""
    kernel, fetch = first(graph, "post_attn"), first(graph, "fetch_kv")
    times = [
        ran(kernel, 0.0, 1.0),
        ran(kernel, 1.0, 1.25),
        ran(kernel, 3.0, 2.0),  # all of it beside two that are fetched
        ran(kernel, 6.0, 3.0),  # for 2.8 of 3 s
        ran(kernel, 20.0, 7.0),  # for a seventh
        ran(fetch, 2.2, 1.8),
        ran(fetch, 4.0, 4.8),
        ran(fetch, 20.0, 1.0),
    ]
    assert InStep(graph, times).spans([kernel]) == ([1.0, 1.25], [2.0, 3.0], [])
    assert InStep(graph, times[:3] + times[5:]).spans([kernel]) == ([1.0, 1.25], [], [])


def test_what_the_cpu_takes_counts_with_all_that_is_beside_it(graph):
    attend, copy = first(graph, "attn_cpu"), first(graph, "copy_expert")
    times = [ran(attend, 1.0, 0.5), ran(attend, 2.0, 0.75), ran(copy, 0.0, 4.0)]
    assert InStep(graph, times).spans([attend]) == ([0.5, 0.75], [], [])


def test_rows_of_new_kv_are_of_the_lane_that_crowds(graph):
    append, fetch = first(graph, "append_kv"), first(graph, "fetch_kv")
    times = [ran(append, 1.0, 0.5), ran(append, 2.0, 0.75), ran(fetch, 3.0, 1.0)]
    assert InStep(graph, times).spans([append]) == ([0.5, 0.75], [], [])
    assert InStep(graph, [*times, ran(fetch, 4.0, 1.0)]).spans([fetch]) == NOTHING


def test_new_kv_that_shares_the_link_with_queries_does_not_count(graph):
    append, send = first(graph, "append_kv"), first(graph, "send_qkv")
    times = [
        ran(append, 1.0, 0.5),
        ran(append, 2.0, 0.75),
        ran(append, 3.0, 2.0),  # for a half of it
        ran(send, 4.0, 1.0),
    ]
    assert InStep(graph, times).spans([append]) == ([0.5, 0.75], [], [])
    assert InStep(graph, times).spans([send]) == NOTHING  # all of it beside new KV, and once only


def test_prompts_attention_counts_with_their_new_kv_beside_it():
    """Which goes down at the same time in any wave: it is no crowd, nor is there any without."""
    s = mg.Strategy(B=8, b_a=4, b_e=64, s_expert=4 * MODEL.expert_bytes)
    wave = mg.build(MODEL, s, "prefill", prompt_len=16)
    attend, append = first(wave, "attn_prefill"), first(wave, "append_kv")
    assert append.lane is Lane.KV
    spans = [(1.0, 0.5), (2.0, 0.75), (3.0, 1.0), (5.0, 1.5)]
    down = [ran(append, 1.0, 1.0), ran(append, 2.0, 0.25), ran(append, 5.0, 2.0)]
    times = [*(ran(attend, *span) for span in spans), *down]
    times.append(ran(attend, 8.0, 9.0, issued_s=8.5))  # still being launched
    assert InStep(wave, times).spans([attend]) == ([0.5, 0.75, 1.0, 1.5], [], [])
    # Another kernel that ran as they did: one alone, two in the crowd, and one in between.
    other = first(wave, "post_attn")
    others = [*(ran(other, *span) for span in [*spans, (4.0, 0.5)]), *down]
    assert InStep(wave, others).spans([other]) == ([1.0, 0.5], [0.5, 1.5], [])


@pytest.mark.parametrize("op", ["copy_counts", "send_qkv"])
def test_small_transfers_are_told_apart_by_copies_of_weights(graph, op):
    small, copy = first(graph, op), first(graph, "copy_expert")
    spans = [(1.0, 0.5), (2.0, 0.25), (3.0, 1.5), (6.0, 1.25)]
    times = [*(ran(small, *span) for span in spans), ran(copy, 2.9, 5.0)]
    assert InStep(graph, times).spans([small]) == ([0.5, 0.25], [], [1.5, 1.25])
    kernel = first(graph, "route")
    times = [*(ran(kernel, *span) for span in spans), ran(copy, 2.9, 5.0)]
    assert InStep(graph, times).spans([kernel]) == ([0.5, 0.25, 1.5, 1.25], [], [])


def test_experts_count_where_nearly_all_have_tokens(graph):
    experts = [t for t in graph if t.id.op == "expert"]
    n = len(experts)
    all_work = [ran(t, float(i), 0.5) for i, t in enumerate(experts)]
    assert InStep(graph, all_work).spans(experts) == ([0.5] * n, [], [])
    idle = max(1, n // 5)
    some = [ran(t, float(i), 0.5 * (i >= idle)) for i, t in enumerate(experts)]
    assert InStep(graph, some).spans(experts) == NOTHING


def test_of_no_steps_nothing_is_told(graph):
    assert InStep(graph, []).spans([first(graph, "expert")]) == NOTHING


def test_what_copies_and_fetched_kv_move_together_and_copies_alone(graph):
    ops = ("copy_expert", "fetch_kv", "attn_cpu", "append_kv", "send_qkv")
    copy, fetch, attend, append, send = (first(graph, op) for op in ops)
    weights, kv = copy.work.h2d_bytes, fetch.work.h2d_bytes
    assert weights > 0 and kv > 0
    times = [
        ran(copy, 0.0, 1.0),
        ran(copy, 1.0, 1.5),
        ran(copy, 10.0, 3.0),  # all of it beside KV
        ran(fetch, 10.0, 1.0),
        ran(fetch, 11.0, 2.0),
        ran(copy, 20.0, 4.0),  # for a half
        ran(fetch, 22.0, 7.0),
        ran(copy, 40.0, 5.0),  # with KV beside the CPU's attention
        ran(fetch, 40.0, 5.0),
        ran(attend, 40.0, 5.0),
        ran(copy, 50.0, 1e-4),  # too short to tell
        ran(copy, 60.0, 2.0),  # beside what goes down
        ran(append, 60.0, 2.0),
        ran(copy, 70.0, 2.0),
        ran(send, 70.0, 2.0),
        ran(copy, 80.0, 6.0),  # beside KV, of which the launch took the most
        ran(fetch, 80.0, 6.0, issued_s=85.0),
    ]
    moved = InStep(graph, times).shared_link()
    expected = [[2 * weights, 2.5], [2 * weights, 9.0], [2 * kv, 3.0]]
    assert moved == pytest.approx(np.array(expected))
    assert not InStep(graph, []).shared_link().any()


def test_what_copies_lose_beside_the_cpus_attention(graph):
    copy, attend, fetch = (first(graph, op) for op in ("copy_expert", "attn_cpu", "fetch_kv"))
    rate = attend.work.host_bytes / 2.0  # at its fastest it would take 2 s
    times = [
        ran(copy, 0.0, 1.0),
        ran(copy, 1.0, 1.0),
        ran(copy, 10.0, 1.5),  # all of it beside attention
        ran(copy, 12.0, 1.2),  # for a half
        ran(copy, 20.0, 9.0),  # beside KV too
        ran(copy, 40.0, 3.0),  # beside attention that something else binds
        ran(attend, 9.0, 3.6),
        ran(attend, 19.0, 4.0),
        ran(attend, 39.0, 5.0),
        ran(fetch, 20.0, 5.0),
    ]
    lost_s, beside_s = InStep(graph, times).slowed_copies(rate)
    assert (lost_s, beside_s) == (pytest.approx(0.5 + 0.2), pytest.approx(1.5 + 0.6))
    # Without any that is undisturbed nobody knows what one takes.
    assert InStep(graph, times[1:]).slowed_copies(rate) == (0.0, 0.0)
    assert InStep(graph, times[:2]).slowed_copies(rate) == (0.0, 0.0)
    assert InStep(graph, []).slowed_copies(rate) == (0.0, 0.0)
