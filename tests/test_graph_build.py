"""The builder: tasks counted by hand, edges written out, rings and layouts."""

from __future__ import annotations

from collections import Counter

import pytest
from small_models import deepseek, mixtral, two_layers

from moegen.errors import GraphError, InvalidInput
from moegen.graph.build import build, lay_out
from moegen.graph.model import ModelSpec
from moegen.graph.ops import OPS
from moegen.graph.passes import assemble, buffer_edges, needed_edges, unroll
from moegen.graph.shape import Shape
from moegen.graph.strategy import Strategy
from moegen.graph.task import EdgeKind, Lane, Layout, Ring, Task, TaskId, Value

ENDS = {"copy_rows": 1, "embed": 1, "lm_head": 1, "sample": 1, "copy_tokens": 1}


def ops(g):
    return Counter(t.id.op for t in g)


def spelled(g, kind):
    """Edges of a kind as text: "op.layer.part>op.layer.part buffer", "+" for the next step."""

    def name(i):
        part = i.microbatch if i.microbatch >= 0 else i.expert
        return ".".join([i.op, *(str(n) for n in (i.layer, part) if n >= 0)])

    return {
        f"{name(e.src)}>{'+' * e.reason.distance}{name(e.dst)} {e.reason.buffer}"
        + "!" * e.reason.host
        for e in g.edges
        if e.reason.kind is kind
    }


def test_a_decode_step_has_these_tasks():
    # Two of four rows on the CPU, the others in micro-batches of one.
    g = build(mixtral(), Strategy(B=4, b_a=1, b_e=8, omega=0.5), kv_len=9)
    assert g.layout == Layout(2, (1, 1))
    a_layer = {
        "copy_dense": 1, "pre_attn": 1, "send_qkv": 1, "attn_cpu": 1, "recv_attn": 1,
        "fetch_kv": 2, "append_kv": 1, "attn_gpu": 2, "post_attn": 1,
        "route": 1, "copy_counts": 1, "copy_expert": 4, "expert": 4, "combine": 1,
    }  # fmt: skip
    assert ops(g) == ENDS | {op: 2 * n for op, n in a_layer.items()}
    assert len(g) == 49
    # On the GPU alone, and on the CPU alone.
    gpu = ops(build(mixtral(), Strategy(B=4, b_a=3, b_e=8), kv_len=9))
    assert (gpu["attn_gpu"], gpu["fetch_kv"], gpu["append_kv"]) == (4, 4, 2)
    assert not gpu.keys() & {"send_qkv", "attn_cpu", "recv_attn"}
    cpu = ops(build(mixtral(), Strategy(B=4, b_a=3, b_e=8, omega=1.0), kv_len=9))
    assert not cpu.keys() & {"attn_gpu", "fetch_kv", "append_kv"}
    assert cpu["attn_cpu"] == cpu["send_qkv"] == cpu["recv_attn"] == 2


def test_a_prefill_step_has_these_tasks():
    g = build(mixtral(), Strategy(B=5, b_a=2, b_e=8, omega=0.5), "prefill", prompt_len=9)
    assert g.layout == Layout(0, (2, 2, 1))  # omega is of decode
    a_layer = {
        "copy_dense": 1, "pre_attn": 3, "append_kv": 3, "attn_prefill": 3, "post_attn": 3,
        "route": 1, "copy_counts": 1, "copy_expert": 4, "expert": 4, "combine": 1,
    }  # fmt: skip
    assert ops(g) == ENDS | {op: 2 * n for op, n in a_layer.items()}


def test_leading_dense_layers_and_shared_experts():
    g = build(deepseek(), Strategy(B=2, b_a=1, b_e=8, expert_group=3), kv_len=9)
    per_layer = {n: Counter(t.id.op for t in g if t.id.layer == n) for n in range(3)}
    assert per_layer[0]["dense_mlp"] == 1
    assert not per_layer[0].keys() & {"route", "expert", "copy_expert", "combine", "shared_expert"}
    for n in (1, 2):
        assert per_layer[n]["dense_mlp"] == 0 and per_layer[n]["shared_expert"] == 1
        # Eight experts in threes: 0-2, 3-5, 6-7.
        assert per_layer[n]["expert"] == per_layer[n]["copy_expert"] == 3
    assert [t.id.expert for t in g if t.id[:4] == ("expert", "decode", 0, 1)] == [0, 3, 6]


def test_resident_weights_are_not_copied():
    model = mixtral()
    dense = sum(layer.dense_bytes for layer in model.layers)
    s = Strategy(B=2, b_a=1, b_e=8, s_params=dense + 3 * model.expert_bytes)
    g = build(model, s, kv_len=9)
    # Both dense blobs stay, and three of the eight experts: one and two.
    copied = [(t.id.layer, t.id.expert) for t in g if t.id.op == "copy_expert"]
    assert copied == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert ops(g)["copy_dense"] == 0 and ops(g)["expert"] == 8
    assert "dense_weights" not in g.rings and g.rings["expert_weights"].uses == 5
    everything = build(model, s.with_(s_params=model.weight_bytes), kv_len=9)
    assert not ops(everything).keys() & {"copy_dense", "copy_expert"}
    assert Lane.BULK not in everything.lanes and "expert_weights" not in everything.rings
    # Groups do not mix what stays with what passes.
    grouped = build(model, s.with_(expert_group=4), kv_len=9)
    assert [t.id.expert for t in grouped if t.id.op == "expert"] == [0, 1, 0, 2]
    assert [t.id.expert for t in grouped if t.id.op == "copy_expert"] == [1, 2]


def test_routed_fetch_has_a_task_for_each_expert_that_can_be_active():
    s = Strategy(B=1, b_a=1, b_e=8, fetch="routed")
    g = build(mixtral(), s, kv_len=9)
    assert ops(g)["expert"] == ops(g)["copy_expert"] == 4  # one token, two experts, two layers
    assert ops(build(mixtral(), s.with_(B=2), kv_len=9))["expert"] == 8
    assert ops(build(mixtral(), s.with_(B=8), kv_len=9))["expert"] == 8
    # What routing decides is copied once the host knows; dense weights of the next layer first.
    assert "copy_counts.0>copy_expert.0.1 host_counts!" in spelled(g, EdgeKind.DATA)
    bulk = [str(t.id) for t in g.lanes[Lane.BULK]]
    assert bulk == [
        "decode:copy_dense.s0.l0",
        "decode:copy_dense.s0.l1",
        "decode:copy_expert.s0.l0.e0",
        "decode:copy_expert.s0.l0.e1",
        "decode:copy_expert.s0.l1.e0",
        "decode:copy_expert.s0.l1.e1",
    ]
    # With all experts copied nobody waits for the router.
    ahead = spelled(build(mixtral(), s.with_(fetch="all"), kv_len=9), EdgeKind.DATA)
    assert not any(">copy_expert" in e for e in ahead)


def test_every_op_of_the_vocabulary_is_used():
    s = Strategy(B=4, b_a=1, b_e=8, omega=0.5)
    used = Counter()
    for phase, size in (("decode", {"kv_len": 9}), ("prefill", {"prompt_len": 9})):
        used += ops(build(deepseek(), s, phase, **size))
    assert used.keys() == OPS.keys()
    for op in OPS.values():
        assert op.name and op.does


def test_inputs_written_out():
    """By hand from the design's decode step, layer by layer."""
    expected = {
        "copy_tokens>+copy_rows host_tokens!",
        "copy_rows>embed rows",
        "embed>pre_attn.0 hidden",
        "combine.0>pre_attn.1 hidden",
        "embed>post_attn.0 hidden",
        "combine.0>post_attn.1 hidden",
        "combine.1>lm_head hidden",
        "copy_rows>lm_head rows",
        "lm_head>sample logits",
        "sample>copy_tokens tokens",
        "lm_head>copy_tokens logits",
    }
    for n in range(2):
        expected |= {
            f"copy_rows>pre_attn.{n} rows",
            f"copy_dense.{n}>pre_attn.{n} dense_weights",
            f"pre_attn.{n}>send_qkv.{n} qkv",
            f"send_qkv.{n}>attn_cpu.{n} host_qkv",
            f"attn_cpu.{n}>recv_attn.{n} host_attn",
            f"recv_attn.{n}>post_attn.{n} attn_out",
            f"pre_attn.{n}>append_kv.{n} qkv",
            f"copy_rows>append_kv.{n} rows",
            f"append_kv.{n}>+fetch_kv.{n}.0 kv_store",
            f"copy_rows>fetch_kv.{n}.0 rows",
            f"fetch_kv.{n}.0>attn_gpu.{n}.0 kv",
            f"pre_attn.{n}>attn_gpu.{n}.0 qkv",
            f"copy_rows>attn_gpu.{n}.0 rows",
            f"attn_gpu.{n}.0>post_attn.{n} attn_out",
            f"copy_dense.{n}>post_attn.{n} dense_weights",
            f"post_attn.{n}>route.{n} normed",
            f"copy_dense.{n}>route.{n} dense_weights",
            f"route.{n}>copy_counts.{n} counts",
            f"post_attn.{n}>combine.{n} hidden",
            f"route.{n}>combine.{n} routing",
        }
        for e in range(2):
            expected |= {
                f"copy_expert.{n}.{e}>expert.{n}.{e} expert_weights",
                f"post_attn.{n}>expert.{n}.{e} normed",
                f"route.{n}>expert.{n}.{e} routing",
                f"copy_counts.{n}>expert.{n}.{e} host_counts!",
                f"expert.{n}.{e}>combine.{n} expert_out",
            }
    assert spelled(two_layers(), EdgeKind.DATA) == expected


def test_lanes_in_program_order_written_out():
    g = two_layers()
    assert {lane: [t.id.op for t in ts] for lane, ts in g.lanes.items()} == {
        Lane.GPU: [
            "embed",
            *["pre_attn", "attn_gpu", "post_attn", "route", "expert", "expert", "combine"] * 2,
            "lm_head",
            "sample",
        ],
        Lane.BULK: ["copy_dense", "copy_expert", "copy_expert"] * 2,
        Lane.KV: ["fetch_kv", "append_kv"] * 2,
        Lane.ACT: ["copy_rows", *["send_qkv", "recv_attn", "copy_counts"] * 2, "copy_tokens"],
        Lane.CPU: ["attn_cpu"] * 2,
    }
    lane = spelled(g, EdgeKind.LANE)
    assert {"fetch_kv.0.0>append_kv.0 ", "append_kv.0>fetch_kv.1.0 "} <= lane
    assert {"append_kv.1>+fetch_kv.0.0 ", "copy_tokens>+copy_rows ", "sample>+embed "} <= lane
    assert len(lane) == len(g)  # a ring of edges around each lane


def slots_of(edges, buffer):
    return sorted(e.removesuffix(f" {buffer}") for e in edges if e.endswith(f" {buffer}"))


def test_slots_are_taken_in_turn():
    """The n-th use of a buffer waits for the users of use n - S: rings of 1, 2 and 3 slots."""
    model = mixtral(num_local_experts=2)

    def buffers(slots, **fields):
        s = Strategy(B=2, b_a=1, b_e=8, s_expert=slots * model.expert_bytes, **fields)
        return spelled(build(model, s, kv_len=9), EdgeKind.BUFFER)

    # Copies 0.0, 0.1, 1.0, 1.1 in a step.
    assert slots_of(buffers(1), "expert_weights") == [
        "expert.0.0>copy_expert.0.1",
        "expert.0.1>copy_expert.1.0",
        "expert.1.0>copy_expert.1.1",
        "expert.1.1>+copy_expert.0.0",
    ]
    assert slots_of(buffers(3), "expert_weights") == [
        "expert.0.0>copy_expert.1.1",
        "expert.0.1>+copy_expert.0.0",
        "expert.1.0>+copy_expert.0.1",
        "expert.1.1>+copy_expert.1.0",
    ]
    # More slots than uses are as many slots as uses.
    assert slots_of(buffers(9), "expert_weights") == [
        f"expert.{n}.{e}>+copy_expert.{n}.{e}" for n in range(2) for e in range(2)
    ]
    # Fetches 0.0, 0.1, 1.0, 1.1; a slot is free once attention has read it.
    assert slots_of(buffers(1, kv_slots=2), "kv") == [
        "attn_gpu.0.0>fetch_kv.1.0",
        "attn_gpu.0.1>fetch_kv.1.1",
        "attn_gpu.1.0>+fetch_kv.0.0",
        "attn_gpu.1.1>+fetch_kv.0.1",
    ]
    one = slots_of(buffers(1, dense_slots=1), "dense_weights")
    assert "route.0>copy_dense.1" in one and "route.1>+copy_dense.0" in one
    two = slots_of(buffers(1, dense_slots=2), "dense_weights")
    assert "route.0>+copy_dense.0" in two and "route.0>copy_dense.1" not in two


def test_the_ring_says_which_slot():
    ring = Ring("kv", slots=3, uses=4)
    assert [ring.slot(0, n) for n in range(4)] == [0, 1, 2, 0]
    assert [ring.slot(1, n) for n in range(4)] == [1, 2, 0, 1]  # goes on where it stopped
    assert Ring("kv_store", slots=0, uses=4).slot(7, 3) == 0


def test_rows_are_shared_by_kv_bytes_and_cut_by_slots():
    s = Strategy(B=4, b_a=2, b_e=8, omega=0.5)

    def shape(*past):
        return Shape(past, (1,) * len(past))

    assert lay_out(s, "decode", shape(9, 9, 9, 9)) == Layout(2, (2,))
    # The first row holds half of all the tokens.
    assert lay_out(s, "decode", shape(29, 9, 9, 9)) == Layout(1, (2, 1))
    assert lay_out(s.with_(omega=0.0), "decode", shape(9, 9, 9)) == Layout(0, (2, 1))
    assert lay_out(s.with_(omega=1.0), "decode", shape(9, 9, 9)) == Layout(3, ())
    cut = lay_out(s.with_(omega=0.0, b_a=4), "decode", shape(9, 9, 29, 4, 4), 20)
    assert cut == Layout(0, (2, 1, 2))  # 10 + 10, 30 though it is too long, 5 + 5
    assert Layout(2, (1, 3)).micro_batch(1) == range(3, 6) and Layout(2, (1, 3)).rows == 6


@pytest.mark.parametrize(
    ("phase", "kwargs", "says"),
    [
        ("train", {"kv_len": 3}, "phase must be"),
        ("decode", {}, "give kv_len"),
        ("decode", {"prompt_len": 3}, "prompt_len is not a size of the decode phase"),
        ("prefill", {"kv_len": 3}, "kv_len is not a size of the prefill phase"),
        ("decode", {"kv_len": 3, "lengths": [3]}, "give kv_len"),
        ("prefill", {"lengths": [3, 0]}, "at least 1"),
        ("decode", {"lengths": [3, -1]}, "at least 0"),
        ("decode", {"lengths": []}, "lengths is empty"),
        ("decode", {"kv_len": 3, "schedule": "best"}, "unknown schedule 'best'"),
    ],
)
def test_what_cannot_be_built_is_refused(phase, kwargs, says):
    with pytest.raises(InvalidInput, match=says):
        build(mixtral(), Strategy(B=2, b_a=1, b_e=8), phase, **kwargs)


# Passes on hand-made tasks.


def made(op, lane, reads=(), writes=()):
    return Task(TaskId(op, "decode"), Lane(lane), tuple(reads), tuple(writes))


def test_assemble_refuses_what_cannot_run():
    x, ring = Value("x"), {"x": Ring("x", 1, 1)}
    copy, use = made("copy_rows", "ACT", writes=[x]), made("embed", "GPU", reads=[x])
    assert len(assemble([copy, use], ring)) == 2
    with pytest.raises(GraphError, match=r"reads x\[0\], which no task writes"):
        assemble([use], {})
    with pytest.raises(GraphError, match="before .*copy_rows.* writes it"):
        assemble([use, copy], ring)
    with pytest.raises(GraphError, match="x crosses lanes ACT, GPU without a ring"):
        assemble([copy, use], {})
    with pytest.raises(GraphError, match="x has 2 slots for 1 uses a step"):
        assemble([copy, use], {"x": Ring("x", 2, 1)})
    with pytest.raises(GraphError, match="same TaskId"):
        assemble([copy, copy], {})
    # One slot, and the second value is written before the first has been read.
    with pytest.raises(GraphError, match="wait for each other"):
        y = Value("x", 1)
        again = Task(TaskId("copy_rows", "decode", 0, 1), Lane.ACT, (), (y,))
        late = Task(TaskId("embed", "decode", 0, 1), Lane.GPU, (x, y))
        assemble([copy, again, late], {"x": Ring("x", 1, 2)})


def test_unrolled_steps_are_joined_where_there_is_a_step_before():
    g = two_layers()
    u = g.unroll(3)
    within = sum(e.reason.distance == 0 for e in g.edges)
    across = len(g.edges) - within
    assert len(u) == 3 * len(g) and u.n_steps == 3
    assert len(u.edges) == 3 * within + 2 * across
    assert {e.reason.distance for e in u.edges} == {0}
    rows, tokens = TaskId("copy_rows", "decode", 1), TaskId("copy_tokens", "decode", 0)
    assert any((e.src, e.dst) == (tokens, rows) for e in u.edges)
    assert u.preds[rows._replace(step=0)] == ()
    # Values are numbered on, so that each still has its slot.
    copies = [t.writes[0] for t in u if t.id.op == "copy_expert"]
    assert [v.index for v in copies] == list(range(12))
    ring, whole = g.rings["expert_weights"], u.rings["expert_weights"]
    assert [whole.slot(0, v.index) for v in copies] == [
        ring.slot(step, n) for step in range(3) for n in range(4)
    ]
    for n in (0, -1):
        with pytest.raises(InvalidInput, match="at least 1"):
            unroll(g, n)
    with pytest.raises(GraphError, match="already unrolled over 3 steps"):
        unroll(u, 2)


def test_needed_edges_are_those_that_no_other_path_replaces():
    # a -> b -> c by inputs, and a -> c by a slot: implied. d only by a slot: needed.
    x, y, z, w = (Value(name) for name in "xyzw")
    tasks = [
        made("a", "GPU", writes=[x]),
        made("b", "CPU", reads=[x], writes=[y, w]),
        made("c", "BULK", reads=[y], writes=[z]),
        made("d", "KV", reads=[w]),
    ]
    tasks.append(Task(TaskId("a", "decode", 0, 1), Lane.BULK, (), (Value("w", 1),)))
    rings = {n: Ring(n, 1, 1) for n in "xyz"} | {"w": Ring("w", 1, 2)}
    g = assemble([*tasks], rings)
    second, d = tasks[-1].id, tasks[3].id
    assert (d._replace(step=0), second._replace(step=0)) in needed_edges(g, 1)
    assert (tasks[1].id, second) not in needed_edges(g, 1)  # c lies between
    assert buffer_edges(g, 1) == {"w": True}
    without = g.without(EdgeKind.BUFFER, "w")
    assert "w" not in buffer_edges(without, 2)
    assert len(without.edges) < len(g.edges)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_experts_that_stay_are_chosen_no_more_often_than_others(batch, share):
    """A router does not know which experts are on the GPU."""
    model = ModelSpec.from_pretrained("mixtral-8x7b")
    nothing, some = (
        build(
            model,
            Strategy(B=batch, b_a=8, b_e=1024, s_params=int(nbytes), fetch="routed"),
            "decode",
            kv_len=64,
        )
        for nbytes in (0, residency_bytes(model, share))
    )
    copied, of = (
        sum(t.work.h2d_bytes for t in g.tasks if t.id.op == "copy_expert") for g in (some, nothing)
    )
    assert copied / of == pytest.approx(1 - share, abs=0.05)


def residency_bytes(model, share):
    experts = [layer for layer in model.layers if layer.n_experts]
    nbytes = sum(layer.n_experts * layer.expert_bytes for layer in experts)
    return sum(layer.dense_bytes for layer in model.layers) + share * nbytes
