"""The token loop and execute: rows ending when they end, barriers, callbacks, Timelines."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import edit_config, tiny_deepseek_v2, tiny_mixtral  # noqa: E402

from moegen.errors import GraphError, InvalidInput, MachineError  # noqa: E402
from moegen.exec import generate, program  # noqa: E402
from moegen.exec.buffers import Buffers  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.kv import KVStore  # noqa: E402
from moegen.exec.transfer import transfer_for  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.shape import Shape  # noqa: E402
from moegen.graph.sizes import Capacity  # noqa: E402
from moegen.graph.strategy import Plan, Strategy  # noqa: E402
from moegen.graph.task import EdgeKind, Layout  # noqa: E402
from moegen.graph.workload import Workload  # noqa: E402
from moegen.sim.cost import CostModel  # noqa: E402
from moegen.sim.engine import simulate  # noqa: E402

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
MIXED = [40, 1, 3, 25, 1, 11, 2, 60, 7]
PROMPTS = [[5, 9, 70], [11], [3, 8, 100, 42, 17], [60, 61]]
S = Strategy(B=4, b_a=1, b_e=4, omega=0.5)


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v2"])
def path(request, tmp_path_factory):
    make = {"mixtral": tiny_mixtral, "deepseek_v2": tiny_deepseek_v2}[request.param]
    return make(tmp_path_factory.mktemp(request.param), num_hidden_layers=2)[0]


@pytest.fixture(scope="module")
def engine(path, device):
    with Engine.from_pretrained(path, S, device=device, dtype="float32") as e:
        yield e


@pytest.fixture
def builds(monkeypatch):
    """Phase and rows of every graph that a run builds."""
    made = []

    def counting(model, s, phase, *, lengths):
        made.append((phase, len(lengths)))
        return build(model, s, phase, lengths=lengths)

    monkeypatch.setattr(generate, "build", counting)
    return made


def alone(engine, prompts, new_tokens, **kwargs):
    """Each prompt in a call of its own."""
    return [
        engine.generate([p], n, **kwargs)[0].token_ids
        for p, n in zip(prompts, new_tokens, strict=True)
    ]


def test_rows_end_at_their_own_lengths_as_if_alone(engine, builds):
    lengths, order, reports = [9, 2, 12, 4], [], []
    done = engine.generate(
        PROMPTS,
        lengths,
        ignore_eos=True,
        on_finish=lambda i, c: order.append((i, c)),
        on_step=reports.append,
    )
    assert [c.index for c in done] == [0, 1, 2, 3]
    assert [c.completion_tokens for c in done] == lengths
    assert [len(c.token_ids) for c in done] == lengths
    assert [c.prompt_tokens for c in done] == [3, 1, 5, 2]
    assert {c.finish_reason for c in done} == {"length"}
    assert all(c.text == "" and c.logits is None for c in done)
    # Rows end in the order of their lengths, and each is heard of once.
    assert [i for i, _ in order] == [1, 3, 0, 2]
    assert all(c is done[i] for i, c in order)
    # Laid out anew when half are left: 4 rows until the second has ended, then 2, then 1.
    assert builds == [("prefill", 4), ("decode", 4), ("decode", 2), ("decode", 1)]
    assert [r.phase for r in reports] == ["prefill"] + ["decode"] * 11
    assert [r.rows for r in reports] == [4, 4, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1]
    assert [r.tokens_done for r in reports][-1] == sum(lengths)
    times = [r.prefill_s + r.decode_s for r in reports]
    assert times == sorted(times)
    assert [c.token_ids for c in done] == alone(engine, PROMPTS, lengths, ignore_eos=True)


def test_a_barrier_changes_nothing(engine, builds, monkeypatch):
    lengths = [9, 2, 12, 4]
    done = engine.generate(PROMPTS, lengths, ignore_eos=True, return_logits=True)
    assert builds.count(("decode", 4)) == 1 and len(builds) == 4
    builds.clear()
    monkeypatch.setattr(generate, "BARRIER_SHARE", 0.0)
    without = engine.generate(PROMPTS, lengths, ignore_eos=True, return_logits=True)
    assert builds == [("prefill", 4), ("decode", 4)]
    assert [c.token_ids for c in done] == [c.token_ids for c in without]
    for a, b in zip(done, without, strict=True):
        assert a.logits.shape == (a.completion_tokens, 128)
        torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=0)


def test_either_of_two_tokens_ends_a_row(path, engine, device, tmp_path):
    n = 24
    free = [c.token_ids for c in engine.generate(PROMPTS, n, ignore_eos=True)]

    def ends_with(pair):
        return [min((row.index(t) + 1 for t in pair if t in row), default=n) for row in free]

    # Two tokens that end rows at as many different steps as can be, one row not at all.
    pairs = itertools.combinations(sorted({t for row in free for t in row}), 2)
    pair = max(pairs, key=lambda p: (len(set(ends_with(p))), min(ends_with(p)), max(ends_with(p))))
    first, second = pair
    ends = ends_with(pair)
    assert len(set(ends)) >= 3 and min(ends) > 1
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    edit_config(tmp_path, eos_token_id=[first, second])
    with Engine.from_pretrained(tmp_path, S, device=device, dtype="float32") as e:
        done = e.generate(PROMPTS, n)
        assert [c.token_ids for c in done] == [row[:k] for row, k in zip(free, ends, strict=True)]
        # The token that ends a row is its last, and only such rows were stopped.
        for c in done:
            stopped = c.token_ids[-1] in (first, second)
            assert c.finish_reason == ("stop" if stopped else "length")
        assert {first, second} & {c.token_ids[-1] for c in done}
        assert [c.token_ids for c in done] == alone(e, PROMPTS, [n] * 4)
        assert [c.token_ids for c in e.generate(PROMPTS, n, ignore_eos=True)] == free


def test_every_row_may_end_in_prefill(engine, builds):
    done = engine.generate(PROMPTS, 1, ignore_eos=True)
    assert [c.completion_tokens for c in done] == [1] * 4
    assert builds == [("prefill", 4)]


def test_more_prompts_than_rows_go_in_batches(path, device, engine, builds):
    expected = [c.token_ids for c in engine.generate(PROMPTS, 5, ignore_eos=True)]
    builds.clear()
    plan = Plan(prefill=S.with_(B=2, omega=0.0), decode=S.with_(B=3))
    with Engine.from_pretrained(path, plan, device=device, dtype="float32") as e:
        done = e.generate(PROMPTS, 5, ignore_eos=True)
    assert [c.token_ids for c in done] == expected
    # A batch of three in waves of two (of one graph), then the fourth prompt.
    assert builds == [("prefill", 2), ("decode", 3), ("prefill", 1), ("decode", 1)]


@pytest.mark.parametrize(("B", "b_a", "batch"), [(9, 9, 9), (4, 2, 9), (2, 2, 7), (3, 1, 5)])
def test_waves_of_mixed_prompts_change_nothing(path, device, engine, B, b_a, batch):
    prompts = [[(5 * i + k) % 100 + 3 for k in range(n)] for i, n in enumerate(MIXED)]
    plan = Plan(prefill=S.with_(B=B, b_a=b_a, omega=0.0), decode=S.with_(B=batch))
    with Engine.from_pretrained(path, plan, device=device, dtype="float32") as e:
        done = e.generate(prompts, 4, ignore_eos=True)
        assert [c.index for c in done] == list(range(len(prompts)))
        assert [c.prompt_tokens for c in done] == MIXED
        assert [c.token_ids for c in done] == alone(engine, prompts, [4] * 9, ignore_eos=True)
        work = Workload.from_lengths(MIXED, [4] * 9)
        most = Capacity.worst(plan.prefill, work, "prefill", batch)
        for t in e.timelines:
            if t.graph.phase == "prefill":
                shapes = [Shape.from_dict(x) for x in t.meta["shapes"]]
                assert max(shape.tokens for shape in shapes) <= most.tokens
                assert max(s.tokens for s in shapes) - min(s.tokens for s in shapes) <= max(MIXED)


def test_forced_tokens_are_fed_and_scored(engine):
    free = engine.generate(PROMPTS[:2], 6, ignore_eos=True, return_logits=True)
    own = [c.token_ids for c in free]
    again = engine.generate(PROMPTS[:2], 6, ignore_eos=True, return_logits=True, forced=own)
    assert [c.token_ids for c in again] == own
    for a, b in zip(free, again, strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=0)
        assert a.logits.argmax(-1).tolist() == a.token_ids
    other = [[t ^ 1 for t in row] for row in own]
    forced = engine.generate(PROMPTS[:2], 6, ignore_eos=True, return_logits=True, forced=other)
    assert [c.token_ids for c in forced] == other
    # The first step has seen the prompt alone, later ones the forced tokens.
    torch.testing.assert_close(forced[0].logits[0], free[0].logits[0], atol=1e-4, rtol=0)
    assert (forced[0].logits[1] - free[0].logits[1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("prompts", "kwargs", "says"),
    [
        ([[5], []], {}, "prompt 1 is empty"),
        ([[1] * 200], {"max_new_tokens": 400}, "more than the model's context of"),
        ([[5, 128]], {}, r"token id outside \[0, 128\)"),
        ([[-1]], {}, r"prompt 0\[0\] must be a whole number of at least 0, got -1"),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens must be .* at least 1, got 0"),
        ([[5]], {"max_new_tokens": [3, 4]}, "max_new_tokens has 2 entries for 1 prompts"),
        ([[5]], {"forced": []}, "forced has 0 entries for 1 prompts"),
        (["text"], {}, "no tokenizer"),
    ],
)
def test_input_that_cannot_be_served_is_refused_at_once(engine, builds, prompts, kwargs, says):
    with pytest.raises(InvalidInput, match=says):
        engine.generate(prompts, **kwargs)
    assert builds == []


def test_no_prompts_no_work(engine, builds):
    assert engine.generate([]) == [] and builds == []


@pytest.mark.cpu
def test_a_store_says_how_much_is_missing(tmp_path):
    path, _ = tiny_mixtral(tmp_path, num_hidden_layers=2)
    with Engine.from_pretrained(path, S, device="cpu") as e:
        store = KVStore(e.model, 10, torch.float32, pin=False)
        assert store.allocate([3, 4, 3]) == [0, 3, 7]
        with pytest.raises(MachineError, match="holds 10 tokens .* needs 12, .* smaller B"):
            store.allocate([3, 4, 5])


@pytest.mark.cpu
def test_a_closed_engine_says_that_it_is(tmp_path):
    path, _ = tiny_mixtral(tmp_path, num_hidden_layers=2)
    with Engine.from_pretrained(path, S, device="cpu") as e:
        g = build(e.model, S, kv_len=4)
    for use in (lambda: e.execute(g), lambda: e.generate([[1, 2]])):
        with pytest.raises(InvalidInput, match="the engine is closed"):
            use()
    e.close()  # once more does no harm


@pytest.mark.parametrize("fetch", ["all", "routed"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_execute_measures_every_task_of_every_step(engine, phase, fetch):
    s = S.with_(fetch=fetch, expert_group=3)
    lengths = [3, 17, 5, 9]
    g = build(engine.model, s, phase, lengths=lengths)
    t = engine.execute(g, steps=3)
    assert t.graph is g and t.source == "measured"
    assert t.graph.structure_hash == build(engine.model, s, phase, lengths=[2] * 4).structure_hash
    assert t.steps == (0, 1, 2)
    assert Counter(i.step for i in t.ids) == {k: len(g) for k in range(3)}
    assert {i._replace(step=0) for i in t.ids} == {task.id for task in g}
    # The same kind of thing as a simulated one.
    predicted = simulate(g, CostModel.fixed({task.id: 1e-3 for task in g}), steps=3)
    assert set(predicted.ids) == set(t.ids)
    assert list(predicted.to_frame().columns) == list(t.to_frame().columns)
    # Each expert's tokens add up to what was routed, in each layer and step.
    tokens = sum(lengths) if phase == "prefill" else 4
    for step in t.steps:
        for layer in engine.model.moe_layers:
            handled = [
                n
                for i, n in zip(t.ids, t.tokens_actual, strict=True)
                if (i.op, i.layer, i.step) == ("expert", layer, step)
            ]
            assert sum(handled) == tokens * engine.model.layers[layer].top_k
    for shape in map(Shape.from_dict, t.meta["shapes"]):
        assert shape.new == g.shape.new and shape.past == g.shape.past
        assert set(shape.expert_tokens) == set(engine.model.moe_layers)
    # Times obey the graph: no task starts before the inputs of its own step have ended.
    start, end = (dict(zip(t.ids, x, strict=True)) for x in (t.start_s, t.end_s))
    for e in g.edges:
        for k in range(e.reason.distance, 3):
            src = e.src._replace(step=k - e.reason.distance)
            if e.reason.kind is EdgeKind.DATA:
                assert end[src] <= start[e.dst._replace(step=k)] + CLOCK_S[engine.device.type], e


# The clocks of CUDA and of the host are set at one moment, as nearly as that can be told.
CLOCK_S = {"cpu": 0.0, "cuda": 2e-4}


def test_rows_without_new_tokens_are_skipped(engine):
    g = build(engine.model, S, "decode", lengths=[3, 17, 5, 9])
    shape = Shape((3, 17, 5, 9), (1, 0, 1, 0))
    t = engine.execute(g.bind(shape), steps=2)
    took = {i.op: n for i, n in zip(t.ids, t.tokens_actual, strict=True) if i.microbatch == 1}
    assert took == {"fetch_kv": 0, "attn_gpu": 0}  # the fourth row's micro-batch
    assert {n for i, n in zip(t.ids, t.tokens_actual, strict=True) if i.op == "sample"} == {2}


def test_routed_prefill_serves_waves_of_any_size(path, device):
    # The first wave has one token, and so at most two active experts; the second has many.
    prompts = [[5], list(range(3, 60)), [7, 8]]
    decode = S.with_(B=3)
    outs = {}
    for fetch in ("all", "routed"):
        plan = Plan(prefill=Strategy(B=1, b_a=1, b_e=4, fetch=fetch), decode=decode)
        with Engine.from_pretrained(path, plan, device=device, dtype="float32") as e:
            outs[fetch] = [o.token_ids for o in e.generate(prompts, 6, ignore_eos=True)]
    assert outs["routed"] == outs["all"]


def test_a_graph_with_too_few_routed_tasks_is_refused(engine):
    g = build(engine.model, S.with_(fetch="routed", omega=0.0), lengths=[3])
    more = Shape((3,) * 8, (1,) * 8)
    g = replace(g, layout=Layout(0, (8,)))
    with pytest.raises(GraphError, match="active experts"):
        g.bind(more)
    with pytest.raises(GraphError, match="active experts"):  # what the router really chose
        engine.execute(g.with_tasks(g.tasks, more))


def test_buffers_go_with_the_run_that_made_them(engine, monkeypatch):
    made = []

    class Watched(Buffers):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    monkeypatch.setattr(program, "Buffers", Watched)
    gc.collect()
    gc.disable()
    try:
        engine.generate(PROMPTS, 4, ignore_eos=True)
        assert len(made) > 1 and all(ref() is None for ref in made)
    finally:
        gc.enable()


@pytest.mark.cpu
def test_threads_of_attention_leave_torch_as_it_was(tmp_path):
    path, _ = tiny_mixtral(tmp_path, num_hidden_layers=1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Engine.from_pretrained(path, S, device="cpu", dtype="float32", threads=3) as e:
            e.generate(PROMPTS, 2, ignore_eos=True)
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == 2
            assert e.machinery.decode.threads == 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_interrupted_callback_loses_no_finished_row(engine):
    # All rows end in one step; the second callback is interrupted, and comes again.
    told = []

    def finish(index, completion):
        told.append(index)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 3, ignore_eos=True, on_finish=finish)
    assert told == [0, 1, 1, 2, 3]


@pytest.mark.cpu
def test_weights_that_could_not_be_kept_are_fetched_again(engine, monkeypatch):
    machinery = engine.machinery
    whole = engine.model.weight_bytes
    machinery.keep(whole)
    kept = machinery.resident_dense.keys()
    assert kept

    def no_memory(device):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(program, "give_back_gpu_memory", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        machinery.keep(0)
    monkeypatch.undo()
    machinery.keep(whole)
    assert machinery.resident_dense.keys() == kept
    machinery.keep(0)
    assert not machinery.resident_dense


def test_what_is_contiguous_goes_down_through_the_copy_engine(engine, monkeypatch):
    """A kernel that writes to host memory keeps others from ending, and is late behind large
    products: only new KV, a place for each row, is written so."""
    told = Counter()
    of = type(transfer_for(engine.device))
    copy = of.down

    def spy(self, dst, src):
        told[dst.numel()] += 1
        copy(self, dst, src)

    monkeypatch.setattr(of, "down", spy)
    model, n = engine.model, 4
    s = Strategy(B=n, b_a=n, b_e=64, omega=0.5, s_expert=model.layers[-1].experts_bytes)
    engine.execute(build(model, s, kv_len=8), steps=2)
    steps = 3  # one warms up
    family, on_cpu = engine.machinery.family, n // 2
    shape = family.decode_shape(0)
    expected = Counter({model.layers[-1].n_experts: steps * len(model.moe_layers), n: steps})
    expected[on_cpu * shape.n_heads * shape.dk] += steps * model.n_layers  # queries
    new_kv = shape.dk if shape.latent else shape.n_kv_heads * (shape.dk + shape.dv)
    expected[on_cpu * new_kv] += steps * model.n_layers
    assert told == expected
