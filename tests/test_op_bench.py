"""Timing by itself: spans of a lane, the tasks of a graph one by one, copies by size."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from small_models import deepseek, mixtral  # noqa: E402

import moegen as mg  # noqa: E402
from moegen.exec import bulk, table  # noqa: E402
from moegen.exec.bulk import bulk_copies  # noqa: E402
from moegen.exec.host_code import handed_over  # noqa: E402
from moegen.exec.in_step import Spans  # noqa: E402
from moegen.exec.kv import KVStore  # noqa: E402
from moegen.exec.op_bench import op_bench  # noqa: E402
from moegen.exec.op_points import Agenda, Point, strategy  # noqa: E402
from moegen.exec.synthetic import MadeUpKV  # noqa: E402
from moegen.exec.timing import Bench  # noqa: E402
from moegen.exec.told import Told  # noqa: E402
from moegen.exec.waits import latencies  # noqa: E402
from moegen.graph.latencies import Latencies  # noqa: E402
from moegen.graph.task import Lane  # noqa: E402

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
SPAN_S = 1e-3


@pytest.fixture
def bench():
    with Bench(CPU) as b:
        yield b


@contextmanager
def benched(g, machinery, bench, **more):
    with MadeUpKV(machinery) as kv:
        yield op_bench(g, machinery, kv, bench, **more)


# -- spans of a lane -------------------------------------------------------------------


def test_what_runs_between_is_not_timed(bench):
    done = []

    def work():
        done.append("work")
        time.sleep(2e-3)

    def between():
        done.append("between")
        time.sleep(20e-3)

    spans = bench.spans(Lane.GPU, work, span_s=0.01, between=between)
    assert done == ["between", "work"] * (len(done) // 2)
    assert 4 <= len(spans) <= 16 and all(s >= 2e-3 for s in spans)
    assert min(spans) < 15e-3


def test_there_are_as_many_runs_as_the_span_is_long(bench):
    """Two runs say how long one takes; of what is short there are not thousands."""
    runs = []
    spans = bench.spans(Lane.BULK, lambda: runs.append(time.sleep(5e-3)), span_s=0.1)
    assert len(runs) == 2 + len(spans) and 2 <= len(spans) <= 20
    assert len(bench.spans(Lane.BULK, lambda: None, span_s=10.0)) == 200
    assert len(bench.spans(Lane.BULK, lambda: time.sleep(0.05), span_s=1e-3)) == 2


def test_what_is_queued_runs_as_often_as_a_stream_can_be_held(bench):
    spans = bench.spans(Lane.GPU, lambda: None, span_s=10.0, queued=True)
    assert len(spans) in (32, 200)  # 200 where launching took next to nothing
    assert all(s >= 0 for s in spans)


def test_another_lane_is_at_work_all_the_time(bench):
    """Whenever the one begins, the other has begun one more than it has ended, or is about to."""
    other = {"begun": 0, "ended": 0}

    def beside():
        other["begun"] += 1
        time.sleep(1e-3)
        other["ended"] += 1

    seen = []

    def work():
        seen.append(other["begun"])
        time.sleep(5e-3)

    bench.spans(Lane.GPU, work, span_s=0.1, beside=(Lane.BULK, beside))
    assert seen[0] >= 1 and seen == sorted(seen)
    assert seen[-1] > len(seen)  # it went on: some five of its works to one of these
    ended = other["ended"]
    time.sleep(0.01)
    assert other["ended"] == ended == other["begun"]  # and it is over


def test_several_lanes_are_at_work_beside_one_or_none(bench):
    done = dict.fromkeys((Lane.BULK, Lane.KV), 0)

    def beside(lane):
        def work():
            done[lane] += 1
            time.sleep(1e-3)

        return lane, work

    others = [beside(lane) for lane in done]
    for given, grow in ((others, set(done)), (others[:1], {Lane.BULK}), ([], set()), (None, set())):
        before = dict(done)
        assert bench.spans(Lane.GPU, lambda: time.sleep(5e-3), span_s=0.05, beside=given)
        assert {lane for lane in done if done[lane] > before[lane]} == grow


def test_the_other_lanes_fault_is_told(bench):
    def broken():
        raise RuntimeError("beside is broken")

    with pytest.raises(RuntimeError, match="beside is broken"):
        bench.spans(Lane.GPU, lambda: None, beside=(Lane.BULK, broken))


# -- the tasks of a graph --------------------------------------------------------------

MODELS = {"mixtral": mixtral(), "deepseek": deepseek()}


@pytest.fixture(scope="module", params=MODELS)
def engine(request):
    with mg.Engine.random(
        MODELS[request.param], device="cpu", dtype="float32", hardware=mg.HardwareSpec.detect()
    ) as e:
        yield e


def decode(engine, rows=12, group=1):
    return mg.build(engine.model, strategy(engine.model, rows, rows // 2, 0.5, group), kv_len=16)


def prefill(engine):
    return mg.build(engine.model, strategy(engine.model, 4, 2, 0.0, 1), "prefill", prompt_len=16)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_op_of_a_graph_is_timed_by_the_kind(engine, bench, phase):
    g = decode(engine) if phase == "decode" else prefill(engine)
    with benched(g, engine.machinery, bench) as ops:
        for op in dict.fromkeys(t.id.op for t in g):
            found = ops.time(op, SPAN_S)
            tasks = [t for t in g if t.id.op == op and not t.work.empty]
            # One of each kind: tasks with the same work are the same.
            assert len(found) == len({t.work for t in tasks}) > 0, op
            assert {t.task.work for t in found} == {t.work for t in tasks}
            for t in found:
                assert 0 < t.seconds < 1 and t.spread >= 0


def test_tokens_are_dealt_out_as_the_graph_counts_them(engine, bench):
    for g in (decode(engine), decode(engine, rows=5), decode(engine, group=2)):
        with benched(g, engine.machinery, bench) as ops:
            tokens = dict(ops._step.counts)
            assert set(tokens) == set(engine.model.moe_layers)
            ends = ops._program.scratch.expert_ends
            for layer, counts in tokens.items():
                active = [n for n in counts if n]
                assert max(active) - min(active) <= 1
                assert sum(counts) == g.shape.tokens * engine.model.layers[layer].top_k
                assert ends[: len(counts)].tolist() == torch.tensor(counts).cumsum(0).tolist()
            for t in g:
                if t.id.op == "expert":
                    group = tokens[t.id.layer][t.id.expert :][: t.work.launches or 1]
                    assert t.work.tokens == sum(group)


@pytest.mark.parametrize("op", ["recv_attn", "send_qkv", "copy_counts"])
def test_what_the_act_lane_carries_is_timed_alone_and_beside_copies_of_weights(
    engine, bench, monkeypatch, op
):
    with benched(decode(engine), engine.machinery, bench) as ops:
        asked = []

        def spans(lane, work, *, beside, **more):
            asked.append([of for of, _ in beside])
            return [2.0, 2.0] if beside else [1.0, 1.0]

        monkeypatch.setattr(bench, "spans", spans)
        monkeypatch.setattr(ops, "_on_gpu", True)
        (told,) = ops.time(op, SPAN_S)
        assert asked == [[], [Lane.BULK]]
        assert told.seconds == 1.0 and told.beside_copies_s == 2.0
        # What steps tell is not asked again.
        asked.clear()
        monkeypatch.setattr(ops._in_step, "spans", lambda tasks: Spans([], [], [3.0, 3.5]))
        (told,) = ops.time(op, SPAN_S)
        assert asked == [[]]
        assert told.seconds == 1.0 and told.beside_copies_s == 3.25
        (kernel,) = ops.time("route", SPAN_S)
        assert kernel.beside_copies_s is None


def test_steps_tell_what_a_kernel_takes_in_a_crowd(engine, bench, monkeypatch):
    with benched(decode(engine), engine.machinery, bench) as ops:
        monkeypatch.setattr(
            ops._in_step, "spans", lambda tasks: Spans([1.0, 1.0], [4.0, 4.0], [2.0, 2.5])
        )
        (told,) = ops.time("post_attn", SPAN_S)
        assert (told.seconds, told.crowded_s) == (1.0, 4.0)


@contextmanager
def by_itself(engine, bench, monkeypatch, *, omega=0.5, crowded_s=5.0, spans=None):
    """A GPU's steps, what is asked of its ops by themselves, and what these then take: 1 s alone,
    2 s beside copies of weights."""
    g = mg.build(engine.model, strategy(engine.model, 12, 6, omega, 1), kv_len=16)
    with benched(g, engine.machinery, bench) as ops:
        asked = []

        def takes(tasks, span_s, beside):
            asked.append(tuple(lane for lane, _ in beside))
            seconds = {(): 1.0, (Lane.BULK,): 2.0, (Lane.BULK, Lane.KV): crowded_s}
            return [seconds[asked[-1]]] * 2

        monkeypatch.setattr(ops, "_by_itself", takes)
        monkeypatch.setattr(ops, "_on_gpu", True)
        if spans is not None:
            monkeypatch.setattr(ops._in_step, "spans", lambda tasks: spans)
        yield ops, asked


WEIGHTS, ALL = (Lane.BULK,), (Lane.BULK, Lane.KV)


@pytest.mark.parametrize(
    ("op", "alone_s", "usual"), [("route", 2.0, [WEIGHTS]), ("copy_counts", 1.0, [(), WEIGHTS])]
)
def test_in_a_crowd_it_is_timed_beside_fetched_kv_too(
    engine, bench, monkeypatch, op, alone_s, usual
):
    with by_itself(engine, bench, monkeypatch) as (ops, asked):
        (told,) = ops.time(op, SPAN_S, True)
        assert (told.seconds, told.crowded_s, asked) == (alone_s, 5.0, [*usual, ALL])
        asked.clear()
        (told,) = ops.time(op, SPAN_S)  # in none
        assert (told.seconds, told.crowded_s, asked) == (alone_s, None, usual)


@pytest.mark.parametrize("op", ["route", "copy_counts"])
def test_what_steps_tell_is_longer_in_a_crowd_by_what_it_is_by_itself(
    engine, bench, monkeypatch, op
):
    spans = Spans([1.5, 1.5], [], [2.5, 2.5])
    with by_itself(engine, bench, monkeypatch, spans=spans) as (ops, asked):
        (told,) = ops.time(op, SPAN_S, True)
        # A kernel is beside copies of weights all the time; a small copy is timed without.
        usual, takes_s = (WEIGHTS, 2.0) if op == "route" else ((), 1.0)
        assert (told.seconds, told.crowded_s) == (1.5, 1.5 + (5.0 - takes_s))
        assert asked == [ALL, usual]


@pytest.mark.parametrize(("spans", "alone_s"), [(None, 2.0), (Spans([1.5] * 2, [], []), 1.5)])
def test_nothing_is_faster_in_a_crowd(engine, bench, monkeypatch, spans, alone_s):
    with by_itself(engine, bench, monkeypatch, crowded_s=1.75, spans=spans) as (ops, _):
        (told,) = ops.time("route", SPAN_S, True)
        assert told.seconds == told.crowded_s == alone_s


def test_what_steps_tell_of_a_crowd_is_not_asked_again(engine, bench, monkeypatch):
    spans = Spans([1.5, 1.5], [4.0, 4.0], [])
    with by_itself(engine, bench, monkeypatch, spans=spans) as (ops, asked):
        (told,) = ops.time("route", SPAN_S, True)
        assert (told.seconds, told.crowded_s, asked) == (1.5, 4.0, [])


def test_who_is_in_no_crowd(engine, bench, monkeypatch):
    """Copies of weights, the CPU and who fetches KV; and nobody where none is fetched, or where
    lanes share the cores."""
    with by_itself(engine, bench, monkeypatch) as (ops, asked):
        for op in ("copy_expert", "attn_cpu", "fetch_kv", "append_kv"):
            assert {t.crowded_s for t in ops.time(op, SPAN_S, True)} == {None}, op
        monkeypatch.setattr(ops, "_on_gpu", False)
        assert [t.crowded_s for t in ops.time("route", SPAN_S, True)] == [None]
        assert ALL not in asked
    with by_itself(engine, bench, monkeypatch, omega=1.0) as (ops, asked):
        assert not ops.tasks("fetch_kv")
        for op in ("route", "copy_counts"):
            assert [t.crowded_s for t in ops.time(op, SPAN_S, True)] == [None]
        assert ALL not in asked


def test_all_ops_of_a_step_tell_what_they_take_of_the_thread(engine, bench):
    """Not only those that are timed at its size: the thread's code is the same."""
    with benched(decode(engine), engine.machinery, bench) as ops:
        told = {h.task.id.op: h for h in handed_over(ops.graph, ops.records, Latencies())}
        assert set(told) == {t.id.op for t in ops.graph if t.work and not t.work.empty}
        assert all(h.issue_s > 0 and h.turn_s >= 0 and h.times >= 1 for h in told.values())


def test_attention_on_the_cpu_reads_other_rows_each_time(engine, bench, monkeypatch):
    """Else it would read what a cache holds."""
    with benched(decode(engine), engine.machinery, bench) as ops:
        used = []
        monkeypatch.setattr(
            type(ops._program), "run", lambda self, task, index, step: used.append((task, step))
        )
        (first, *_) = ops.tasks("attn_cpu")
        run = ops.work([first])
        n = len(ops._others)
        for _ in range(2 * n):
            run()
        assert n > 1 and [s for _, s in used] == [*ops._others, *ops._others]
        assert {t for t, _ in used} == {first}
        starts = [[row.start for row in step.rows if row is not None] for step in ops._others]
        assert len({start for rows in starts for start in rows}) == n * len(starts[0])
        # Others take turns over their own weights, on the rows of the step that ran.
        used.clear()
        experts = ops.tasks("expert")
        run = ops.work(experts)
        for _ in range(len(experts) + 1):
            run()
        assert [t for t, _ in used] == [*experts, experts[0]]
        assert {id(s) for _, s in used} == {id(ops._step)}


def test_kv_is_made_up_anew_only_where_more_is_needed_and_given_back(engine, monkeypatch):
    """Making it up takes longer than a step; two at once may be more than there is."""
    events = []
    made, given = KVStore.__init__, KVStore.close

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        events.append(("made", self.tokens))

    def close(self):
        events.append(("closed", self.tokens))
        given(self)

    monkeypatch.setattr(KVStore, "__init__", init)
    monkeypatch.setattr(KVStore, "close", close)
    with pytest.raises(ZeroDivisionError), MadeUpKV(engine.machinery) as kv:
        first = kv.store(100)
        assert all(layer.isfinite().all() and layer.any() for layer in first.layers)
        assert kv.store(40) is kv.store(100) is first
        assert kv.store(200) is not first
        assert events == [("made", 100), ("closed", 100), ("made", 200)]
        raise ZeroDivisionError
    assert events[3:] == [("closed", 200)]


def test_points_of_a_grid_share_their_kv(engine, monkeypatch):
    made = []
    monkeypatch.setattr(
        MadeUpKV, "store", lambda self, n, of=MadeUpKV.store: made.append(of(self, n)) or made[-1]
    )
    points = [Point(decode(engine, rows), ("route",), "decode") for rows in (12, 4, 8)]
    agenda = Agenda(points, time.perf_counter() + 60)
    with MadeUpKV(engine.machinery) as kv:
        list(table._timed(engine.machinery, kv, agenda, Told(1e9), []))
    assert len(made) == 3 and made[0] is made[1] is made[2]


def test_rows_whose_kv_would_take_most_of_the_hosts_memory_are_left_out(engine, monkeypatch):
    """Of wide models the longest rows have gigabytes: the system would end the profile."""
    sizes = (8, 4, 12, 16)
    points = [Point(decode(engine, rows), ("route",), "decode") for rows in sizes]
    per_token = engine.model.kv_bytes_per_token
    free = int(points[0].size * per_token / table._KV_SHARE) + per_token
    # What is held already counts as free: it is given back before there is more.
    monkeypatch.setattr(
        table, "free_bytes", lambda: (free - held[-1].nbytes if held else free, "said")
    )
    held, ran, notes = [], [], []
    agenda = Agenda(points, time.perf_counter() + 60)
    monkeypatch.setattr(
        MadeUpKV,
        "store",
        lambda self, n, of=MadeUpKV.store: ran.append(n) or held.append(of(self, n)) or held[-1],
    )
    with MadeUpKV(engine.machinery) as kv:
        assert kv.nbytes == 0
        list(table._timed(engine.machinery, kv, agenda, Told(1e9), notes))
        assert kv.nbytes == held[-1].nbytes == points[0].size * per_token
    assert ran == [points[0].size, points[1].size]
    [note] = notes  # the larger ones of the grid are not tried
    assert note.startswith(f"{engine.model.name}: decode of {points[2].size} tokens needs ")
    assert "of KV, and no more than" in note and "60% of the host memory that is free" in note
    assert note.endswith(", and larger ones were left out")


def test_buffers_of_a_point_are_gone_before_the_next_makes_its_own(engine, monkeypatch):
    """At once, not when cycles are looked for: two points' slots may be more than there is."""
    alive, at_begin = [], []

    def watched(*args, **kwargs):
        at_begin.append([ref for ref in alive if ref() is not None])
        ops = op_bench(*args, **kwargs)
        alive.append(weakref.ref(ops))
        return ops

    points = [Point(decode(engine, rows), ("expert", "pre_attn"), "decode") for rows in (4, 8, 12)]
    monkeypatch.setattr(table, "op_bench", watched)
    gc.disable()
    try:
        agenda = Agenda(points, time.perf_counter() + 60)
        with MadeUpKV(engine.machinery) as kv:
            found = list(table._timed(engine.machinery, kv, agenda, Told(1e9), []))
    finally:
        gc.enable()
    assert {t.task.id.op for t in found} == {"expert", "pre_attn"}
    assert at_begin == [[], [], []]


@pytest.mark.parametrize("steps", [3, 5])
def test_so_many_steps_run_and_all_but_two_count(engine, bench, steps):
    with benched(decode(engine), engine.machinery, bench, steps=steps) as ops:
        assert {t.task.step for t in ops.records} == set(range(2, steps))
        assert ops.time("route", SPAN_S)  # on what the last step left


def test_the_run_before_says_how_long_one_waits(engine, bench):
    with benched(decode(engine), engine.machinery, bench) as ops:
        found = latencies([ops.records], on_gpu=True)
    assert {t.task.op for t in ops.records} == {t.id.op for t in ops.graph}
    assert min(t.task.step for t in ops.records) == 2  # the first two compile and fill
    for seconds in vars(found).values():
        assert 0 <= seconds < 1


# -- copies by size --------------------------------------------------------------------


def test_copies_of_each_size_go_from_another_place_each_time(monkeypatch):
    monkeypatch.setattr(bulk, "_SIZES", (1 << 14, 1 << 18, 1 << 23))
    found = list(bulk_copies(CPU, SPAN_S))
    assert [(t.task.id.op, t.task.work.h2d_bytes) for t in found] == [
        (op, n) for n in (1 << 14, 1 << 18, 1 << 23) for op in ("copy_dense", "copy_expert")
    ]
    assert all(t.task.lane is Lane.BULK for t in found)
    for dense, expert in zip(found[::2], found[1::2], strict=True):
        assert dense.seconds == expert.seconds > 0
    assert found[-1].seconds > found[0].seconds  # 512 times as much
