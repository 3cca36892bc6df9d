"""Which sizes a profile measures, and for which of them there is time."""

from __future__ import annotations

import pytest
from small_models import deepseek, mixtral

import moegen as mg
from moegen.exec import op_points
from moegen.exec.op_points import (
    Agenda,
    Point,
    decode_points,
    prefill_points,
    profiled_layers,
)
from moegen.graph.features import FEATURES_OF
from moegen.graph.sound_waves import expert_group

MIB, GIB = 1 << 20, 1 << 30
# Ops whose kernels are timed apart in prefill and decode.
BOTH = {"embed", "pre_attn", "append_kv", "post_attn", "route", "expert", "combine", "lm_head",
        "sample"}  # fmt: skip
DECODE_ROWS = (64, 1024, 1, 4096, 256, 512, 16, 128, 2048)


def catalogue(name):
    return mg.ModelSpec.from_pretrained(name)


RUNNABLE = ["mixtral-8x7b", "mixtral-8x22b", "deepseek-v2", "deepseek-v2-lite"]
SMALL = {
    "mixtral": mixtral(),
    "deepseek": deepseek(),
    "one layer": mixtral(num_hidden_layers=1),
    "one expert a token": mixtral(num_experts_per_tok=1),
}


def points(model, *, on_gpu):
    return [*decode_points(model, on_gpu=on_gpu), *prefill_points(model, on_gpu=on_gpu)]


def found(model, *, on_gpu=False) -> dict[str, list[Point]]:
    grids: dict[str, list[Point]] = {}
    for p in points(model, on_gpu=on_gpu):
        grids.setdefault(p.grid, []).append(p)
    return grids


@pytest.mark.parametrize("name", RUNNABLE)
def test_layers_are_the_fewest_of_each_class_that_are_like_a_deep_models(name):
    whole = catalogue(name)
    part = profiled_layers(whole)
    n = part.n_layers

    def enough(layers):
        kinds = {x.name for x in layers} == {x.name for x in whole.layers}
        dense = sum(x.weight_bytes - x.experts_bytes for x in layers)
        more = [*layers, *whole.layers[len(layers) : len(layers) + 1]]
        full = sum(x.weight_bytes for x in more) > 10 * GIB
        return kinds and (full or (len(layers) >= 3 and dense >= 128 * MIB))

    assert part.layers == whole.layers[:n]
    assert n == whole.n_layers or enough(part.layers)
    assert n == 1 or not enough(whole.layers[: n - 1])


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_is_taken_whole(name):
    assert profiled_layers(SMALL[name]).n_layers == SMALL[name].n_layers


@pytest.mark.parametrize("model", SMALL.values(), ids=list(SMALL))
def test_every_op_of_a_step_is_timed_and_its_features_are_known(model):
    timed = set().union(*(p.timed for p in points(model, on_gpu=False)))
    s = mg.Strategy(B=4, b_a=2, b_e=8, omega=0.5)
    for phase, length in (("decode", {"kv_len": 8}), ("prefill", {"prompt_len": 8})):
        for t in mg.build(model, s.with_(omega=0.5 * (phase == "decode")), phase, **length):
            op = t.id.op
            assert op in FEATURES_OF
            if op in BOTH:
                assert (op, phase) in timed
            else:
                assert {(op, "decode"), (op, "prefill")} & timed, op


def test_on_cpu_lanes_small_sizes_come_first():
    grids = found(mixtral(max_position_embeddings=16384))
    # Each row has 16 tokens behind it and makes one; contexts count the new one.
    assert [p.size for p in grids["decode"]] == [17 * n for n in sorted(DECODE_ROWS)]
    # Three times as many rows on the GPU as on the CPU, but for the largest.
    few = [(n, c) for n in (8, 32, 128) for c in (64, 192, 512, 1536)] + [(1, 64), (1, 1536)]
    assert [p.size for p in grids["attention"]] == sorted(
        [4 * n * c for n, c in few] + [512 * 1536, 512 * 512, 512 * 64, 2048 * 64]
    )
    assert [p.size for p in grids["prefill"]] == [64, 256, 1024, 4096, 16384] + 3 * [65536]
    assert [p.size for p in grids["prompts"]] == 2 * [512] + 6 * [2048] + 7 * [16384]
    assert len(grids) == 4
    for p in grids["decode"]:
        assert p.graph.phase == "decode" and p.graph.shape.rows * 17 == p.size


def at_cpu(p):
    """Rows that the CPU attends to, and their context."""
    (rows,) = {t.work.rows for t in p.graph if t.id.op == "attn_cpu"}
    return rows, p.graph.shape.past[0] + 1


def test_beside_a_gpu_what_tells_most_comes_first():
    grids = found(mixtral(), on_gpu=True)
    assert [p.size for p in grids["prefill"]] == 3 * [65536] + [16384, 4096, 1024, 256, 64]
    # The very ends of rows and context, before what is between them.
    four = grids["attention"][:4]
    at = {(p.graph.shape.rows // 4, p.graph.shape.past[0] + 1) for p in four}
    assert at == {(8, 64), (128, 64), (8, 1536), (128, 1536)}
    # Half of them leave no hole in between.
    half = {at_cpu(p) for p in grids["attention"][:8]}
    assert half == {(n, c) for n in (8, 128) for c in (64, 512, 1536)} | {(512, 64), (512, 512)}
    for p in grids["attention"]:
        if p.graph.strategy.omega == 1:
            continue
        on_gpu = {t.id.microbatch for t in p.graph if t.id.op == "attn_gpu" and t.id.layer == 0}
        on_cpu = {t.work.rows for t in p.graph if t.id.op == "attn_cpu"}
        assert (len(on_gpu), on_cpu) == (3, {p.graph.shape.rows // 4})


def test_decode_steps_beside_a_gpu_have_kv_as_a_run_has():
    """All together 3 GB at most, and with the new token no longer than a model's context."""
    steps = found(mixtral(max_position_embeddings=16384), on_gpu=True)["decode"]
    rows, context = zip(*((p.graph.shape.rows, p.graph.shape.past[0]) for p in steps), strict=True)
    assert rows == DECODE_ROWS
    assert context == (4096, 256, 4096, 64, 1024, 512, 4096, 2048, 128)
    short = found(mixtral(max_position_embeddings=300), on_gpu=True)["decode"]
    contexts = [p.graph.shape.past[0] for p in short]
    assert contexts == [299, 256, 299, 64, 299, 299, 299, 299, 128]
    for name in RUNNABLE:
        part = profiled_layers(catalogue(name))
        for p in found(part, on_gpu=True)["decode"]:
            assert sum(p.graph.shape.past) * part.kv_bytes_per_token <= 3 * GIB


def test_one_step_tells_what_launching_a_further_product_takes():
    (p,) = found(mixtral(), on_gpu=True)["decode, small products"]
    assert p.ops == ("route", "expert")
    assert {t.work.launches for t in p.graph if t.id.op == "route"} == {8}
    assert all(t.work.launches > 1 for t in p.graph if t.id.op == "expert")


def test_there_are_few_slots_for_many_experts():
    """Else copies would fill the driver's queue, and launching them would take as long as they."""
    many = catalogue("deepseek-v2").with_(n_layers=2)
    for p in decode_points(many, on_gpu=True):
        s = p.graph.strategy
        assert s.s_expert == 8 * s.expert_group * many.expert_bytes


def test_products_of_busy_waves_are_of_several_sizes():
    large = [p for p in found(mixtral(), on_gpu=True)["prefill"] if p.size == 65536]
    launches = [max(t.work.launches for t in p.graph if t.id.op == "expert") for p in large]
    assert launches[0] == 1 and launches == sorted(set(launches))
    # And of several numbers of rows, which are what lm_head and sample work on.
    assert [p.graph.shape.rows for p in large] == [1024, 256, 128]
    # A wave that leaves a GPU time to cool has several products too: 16384 x 2 rows, 4 experts.
    (cool,) = [p for p in found(mixtral(), on_gpu=True)["prefill"] if p.size == 16384]
    assert max(t.work.launches for t in cool.graph if t.id.op == "expert") == 4
    assert cool.graph.shape.rows == 64


def test_only_steps_of_64_and_of_1024_rows_beside_a_gpu_are_a_crowd():
    for model in SMALL.values():
        crowds = [p for p in points(model, on_gpu=True) if p.crowd]
        assert [(p.grid, p.graph.phase, p.graph.shape.rows) for p in crowds] == [
            ("decode", "decode", 64),
            ("decode", "decode", 1024),
        ]
        # There is KV to be beside, and ops to be timed beside it.
        assert any(t.id.op == "fetch_kv" for t in crowds[0].graph)
        assert set(crowds[0].ops) & op_points.CROWDED_OPS
        assert not any(p.crowd for p in points(model, on_gpu=False))


def test_rows_are_sent_where_attention_is_timed():
    grids = found(deepseek(), on_gpu=True)
    timing = {grid for grid, of in grids.items() if any("send_qkv" in p.ops for p in of)}
    assert timing == {"attention"} and all("send_qkv" in p.ops for p in grids["attention"])


def test_experts_that_go_in_groups_are_timed_one_by_one_too():
    many = deepseek()
    assert expert_group(many) > 1
    single = found(many)["decode, single experts"]
    assert {op for p in single for op in p.ops} == {"copy_expert", "expert"}
    groups = {t.work.launches for t in found(many)["decode"][2].graph if t.id.op == "expert"}
    ones = {t.work.launches for t in single[1].graph if t.id.op == "expert"}
    assert groups == {expert_group(many)} and ones == {1}
    assert expert_group(mixtral()) == 1 and "decode, single experts" not in found(mixtral())


def test_whole_steps_tell_the_thread_of_all_ops_and_others_of_those_that_they_time():
    grids = found(mixtral(), on_gpu=True)
    for p in (*grids["decode"], *grids["prefill"]):
        assert p.tells == {t.id.op for t in p.graph}
    few = found(deepseek(), on_gpu=True)
    of_parts = "attention", "prompts", "decode, small products", "decode, single experts"
    for p in (p for name in of_parts for p in few[name]):
        ops = {t.id.op for t in p.graph}
        assert p.tells == ops & set(p.ops) and p.tells < ops
    assert grids["decode"][0].steps > grids["attention"][0].steps
    assert found(mixtral())["decode"][0].steps == grids["attention"][0].steps  # on CPU lanes


def test_prompts_are_no_longer_than_the_models_context():
    long = found(mixtral(max_position_embeddings=4096))
    short = found(mixtral(max_position_embeddings=100))
    lengths = [{p.graph.shape.new[0] for p in x["prompts"]} for x in (long, short)]
    assert lengths == [{16, 64, 128, 256, 512, 2048}, {16, 64}]


def test_a_limit_of_weights_takes_fewer_layers_and_still_one_of_each_class():
    whole = deepseek(num_hidden_layers=6)
    first, *others = [layer.weight_bytes for layer in whole.layers]
    assert profiled_layers(whole, 1).n_layers == 2  # one dense, one of experts
    assert profiled_layers(whole, first + 3 * others[0]).n_layers == 4
    assert profiled_layers(whole, first + 4 * others[0] - 1).n_layers == 4
    assert profiled_layers(whole, first + 4 * others[0]).n_layers == 5
    assert profiled_layers(whole, first + sum(others)).n_layers == 6


# -- what there is time for ------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when it is told to."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(op_points, "time", clock)
    return clock


def measured(agenda, clock, seconds):
    """The points that an agenda takes, each in ``seconds`` of its size."""
    taken = []
    for p in agenda:
        taken.append(p)
        clock.now += seconds(p.size)
    return taken


def test_with_time_enough_everything_is_measured(clock):
    agenda = Agenda(points(mixtral(), on_gpu=False), 1e9)
    taken = measured(agenda, clock, lambda n: 1.0)
    assert sorted(map(id_of, taken)) == sorted(map(id_of, points(mixtral(), on_gpu=False)))
    assert agenda.late == []


def id_of(p):
    return p.grid, p.size, p.graph.shape_hash


@pytest.mark.parametrize("model", SMALL.values(), ids=list(SMALL))
def test_without_any_time_each_op_is_measured_once(clock, model):
    agenda = Agenda(points(model, on_gpu=False), -1.0)
    taken = measured(agenda, clock, lambda n: 1.0)
    everything = set().union(*(p.timed for p in points(model, on_gpu=False)))
    assert set().union(*(p.timed for p in taken)) == everything
    # None of them without need, and none where a smaller one would have done.
    for i, p in enumerate(taken):
        assert not p.timed <= set().union(*(q.timed for q in taken[:i]))
    assert max(p.size for p in taken) <= 512
    assert len(taken) + len(agenda.late) == len(list(points(model, on_gpu=False)))


@pytest.mark.parametrize("budget_s", [30.0, 100.0, 300.0])
def test_a_machine_that_is_slow_by_the_token_stays_within_its_time(clock, budget_s):
    """A CPU takes ten milliseconds a token: points that would take minutes are not begun."""

    def seconds(tokens):
        return 0.2 + 0.01 * tokens

    agenda = Agenda(points(mixtral(), on_gpu=False), budget_s)
    taken = measured(agenda, clock, seconds)
    assert clock.now <= budget_s and agenda.late
    # What was left out would not have fitted the time that is still left.
    assert min(seconds(p.size) for p in agenda.late) > budget_s - clock.now
    spent = {grid: 0.0 for grid in found(mixtral())}
    for p in taken:
        spent[p.grid] += seconds(p.size)
    if budget_s >= 100:
        # Each of the four has its share, or what it lacks of it was too large to begin.
        assert all(s >= budget_s / 20 for s in spent.values())


def test_grids_share_the_time_evenly(clock):
    """Points of one size, all as slow: none is more than one point ahead of another."""
    agenda = Agenda((Point(g, ("expert",), name) for name, g in graphs(30)), 20.0)
    taken = [p.grid for p in measured(agenda, clock, lambda n: 1.0)]
    assert len(taken) == 20
    assert {taken.count(name) for name in "abc"} == {6, 7}


def test_whole_steps_have_half_as_much_time_again_as_other_grids(clock):
    """Of 20 points, all as slow, 6 for each of two grids and 4 for each of the others."""
    names = "attention", "decode", "prompts", "prefill"
    agenda = Agenda((Point(g, ("expert",), name) for name, g in graphs(60, names)), 20.0)
    taken = [p.grid for p in measured(agenda, clock, lambda n: 1.0)]
    assert {name: taken.count(name) for name in names} == {
        "decode": 6,
        "prefill": 6,
        "attention": 4,
        "prompts": 4,
    }
    # And so all along: whenever the time ends, both have about their share.
    for n in range(1, len(taken)):
        done = [taken[:n].count(name) for name in names]
        assert abs(done[1] - 1.5 * done[0]) <= 2 and abs(done[3] - 1.5 * done[2]) <= 2


def graphs(n, names="abc"):
    g = mg.build(mixtral(), mg.Strategy(B=2, b_a=2, b_e=8), kv_len=8)
    return [(names[i % len(names)], g) for i in range(n)]


def test_a_grid_ends_where_an_op_takes_too_long_and_others_go_on(clock):
    agenda, taken = Agenda(points(mixtral(), on_gpu=False), 1e9), []
    for p in agenda:
        taken.append(p)
        if p.grid == "prefill" and p.size >= 1024:
            agenda.too_large(p)
    assert [p.size for p in taken if p.grid == "prefill"] == [64, 256, 1024]
    assert [p.size for p in taken if p.grid == "prompts"][-1] == 16384
    assert agenda.late == []  # too large, not too late
