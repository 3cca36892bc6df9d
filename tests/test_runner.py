"""The runner: failures leave nothing behind, waits are real, long runs stay small."""

from __future__ import annotations

import gc
import math
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from delays import RandomDelays  # noqa: E402
from handmade import random_graph  # noqa: E402
from tiny import tiny_mixtral  # noqa: E402

from moegen.errors import DeadlockError, InvalidInput  # noqa: E402
from moegen.exec import generate, issue, lanes, runner, threads  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.issue import UNRESOLVED, WINDOW, Issuer  # noqa: E402
from moegen.exec.kernels import KERNELS  # noqa: E402
from moegen.exec.lanes import Clock, CpuStream, UnrecordedEvent  # noqa: E402
from moegen.exec.runner import Runner  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.strategy import Strategy  # noqa: E402
from moegen.graph.task import Edge, EdgeKind, Lane, Reason, Task, TaskGraph, TaskId  # noqa: E402

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
PROMPTS = ([5, 9, 70], [11], [3, 8, 100, 42])


@pytest.fixture(scope="module", params=DEVICES)
def engine(request, tmp_path_factory):
    path, _ = tiny_mixtral(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    s = Strategy(B=3, b_a=1, b_e=4, omega=0.5)
    with Engine.from_pretrained(path, s, device=request.param, dtype="float32", threads=1) as e:
        e.generate(PROMPTS, 2)  # starts what lives as long as the engine
        yield e


class Broken(Exception):
    pass


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize(
    "op", ["post_attn", "copy_expert", "fetch_kv", "append_kv", "copy_counts", "attn_cpu"]
)
def test_a_failing_kernel_ends_the_run_and_its_threads(engine, monkeypatch, op, step):
    kernel, before = KERNELS[op], threading.enumerate()

    def fail(p, task, index, bound):
        if p.phase == "decode" and index >= step:
            raise Broken(f"{task.id} of step {index}")
        kernel(p, task, index, bound)

    expected = engine.generate(PROMPTS, 6, ignore_eos=True)
    monkeypatch.setitem(KERNELS, op, fail)
    with pytest.raises(Broken, match=f"decode:{op}.* of step {step}"):
        engine.generate(PROMPTS, 6, ignore_eos=True)
    assert threading.enumerate() == before
    monkeypatch.undo()
    assert engine.generate(PROMPTS, 6, ignore_eos=True) == expected


def test_a_failing_callback_ends_the_run_and_its_threads(engine):
    before = threading.enumerate()

    def fail(report):
        if report.phase == "decode":
            raise Broken(f"after {report.tokens_done} tokens")

    with pytest.raises(Broken, match="after 6 tokens"):
        engine.generate(PROMPTS, 6, ignore_eos=True, on_step=fail)
    assert threading.enumerate() == before


def test_a_stalled_lane_is_named(engine, monkeypatch):
    """A lane that is late by more than STALL_S; it comes back, so that nothing can hang."""
    before = threading.enumerate()

    class Late:
        def issue_s(self, task, index):
            return 1.5 if task.id.op == "fetch_kv" and index == 1 else 0.0

        def run_s(self, task, index):
            return 0.0

    monkeypatch.setattr(issue, "STALL_S", 0.3)
    with pytest.raises(DeadlockError, match=r"attn_gpu\S* of step 1 wait.* for \S*fetch_kv"):
        engine.generate(PROMPTS, 6, ignore_eos=True, delays=Late())
    assert threading.enumerate() == before


@pytest.mark.parametrize("side", ["issue_s", "run_s"])
@pytest.mark.parametrize("given", [-1e-3, math.nan, math.inf, "1 ms", None, 10**400])
def test_a_delay_that_is_no_time_is_refused(engine, side, given):
    """An infinite one kept the run waiting for ever, a negative one counted as none."""
    before = threading.enumerate()

    class Odd:
        def issue_s(self, task, index):
            return given if (side, task.id.op, index) == ("issue_s", "expert", 1) else 0.0

        def run_s(self, task, index):
            return given if (side, task.id.op, index) == ("run_s", "expert", 1) else 0

    g = build(engine.model, Strategy(B=2, b_a=1, b_e=4), kv_len=8)
    with pytest.raises(InvalidInput, match=r"the delay of decode:expert\S* in step 1, in seconds"):
        engine.execute(g, 3, delays=Odd())
    with pytest.raises(InvalidInput, match=r"the delay of decode:expert\S* in step 1, in seconds"):
        engine.generate(PROMPTS, 6, ignore_eos=True, delays=Odd())
    assert threading.enumerate() == before


@pytest.mark.parametrize("given", [{"expert": 1e-3}, object(), 1e-3])
def test_what_gives_no_delays_is_refused(engine, given):
    g = build(engine.model, Strategy(B=2, b_a=1, b_e=4), kv_len=8)
    with pytest.raises(InvalidInput, match=r"delays must have issue_s\(task, index\) and run_s"):
        engine.execute(g, delays=given)
    with pytest.raises(InvalidInput, match=r"delays must have issue_s\(task, index\) and run_s"):
        engine.generate(PROMPTS, 2, delays=given)


def test_a_long_step_is_no_deadlock(engine, monkeypatch):
    """Every lane but one waits far longer than STALL_S, and the one is at work or moves on."""

    class Slow:
        def issue_s(self, task, index):
            return 0.0

        def run_s(self, task, index):
            return 0.08

    plain = engine.generate(PROMPTS[:2], 2, ignore_eos=True)
    monkeypatch.setattr(issue, "STALL_S", 0.2)
    slow = engine.generate(PROMPTS[:2], 2, ignore_eos=True, delays=Slow())
    assert [o.token_ids for o in slow] == [o.token_ids for o in plain]


def test_a_second_interrupt_leaves_no_lane_behind(engine, monkeypatch):
    before = threading.enumerate()
    joined = []
    wait = threads.Worker.wait

    def interrupted(self):
        if self.name == "moegen-issue" and len(joined) < 2:
            joined.append(self.name)
            raise KeyboardInterrupt
        wait(self)

    def fail(report):
        if report.phase == "decode":
            raise KeyboardInterrupt

    class Late:  # so that lanes are still there when they are waited for
        def issue_s(self, task, index):
            return 0.1 if task.lane in (Lane.BULK, Lane.GPU) and task.id.phase == "decode" else 0.0

        def run_s(self, task, index):
            return 0.0

    monkeypatch.setattr(threads.Worker, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 6, ignore_eos=True, on_step=fail, delays=Late())
    assert len(joined) == 2 and threading.enumerate() == before


def test_a_step_that_nobody_binds_is_a_deadlock(engine, monkeypatch):
    def cut(*args, **kwargs):
        return build(*args, **kwargs).without(EdgeKind.DATA, "host_tokens")

    monkeypatch.setattr(generate, "build", cut)
    monkeypatch.setattr(issue, "STALL_S", 0.5)
    before = threading.enumerate()
    with pytest.raises(DeadlockError, match="nothing moved for .*of step 1 wait.* to be bound"):
        engine.generate(PROMPTS, 6, ignore_eos=True)
    assert threading.enumerate() == before


@pytest.mark.cpu
def test_waiting_for_an_event_that_nobody_recorded_raises():
    clock = Clock(torch.device("cpu"))
    stream = CpuStream("test", clock, lambda e: None)
    try:
        with pytest.raises(UnrecordedEvent):
            stream.wait(None)
        event = stream.record()
        stream.wait(event)  # recorded: fine
        stream.synchronize()
        assert 0 <= event.time_s() <= clock.now()
    finally:
        stream.close()


@pytest.mark.cpu
def test_a_wait_that_fails_is_heard_of_and_leaves_the_lane_alive():
    heard = []
    stream = CpuStream("test", Clock(torch.device("cpu")), heard.append)

    class Faulty:
        rings = True

        def ready(self):
            return True

        def synchronize(self):
            raise Broken("the GPU is gone")

    try:
        stream.wait(Faulty())
        stream.synchronize()
        assert [str(e) for e in heard] == ["the GPU is gone"]
    finally:
        stream.close()


@pytest.mark.cpu
def test_the_host_must_wait_for_the_record_before_the_stream_waits(engine, monkeypatch):
    """What CUDA would pass over in silence: a stream's wait issued before the record."""

    def hasty(self, w, index):
        return True

    class Late:
        def issue_s(self, task, index):
            return 0.3 if task.id.op == "copy_dense" else 0.0

        def run_s(self, task, index):
            return 0.0

    monkeypatch.setattr(Issuer, "_has_recorded", hasty)
    before = threading.enumerate()
    with pytest.raises(UnrecordedEvent, match="needs the event of .* and finds that of step none"):
        engine.generate(PROMPTS, 6, delays=Late())
    assert threading.enumerate() == before


def test_long_runs_do_not_grow(engine, monkeypatch):
    runs, most = [], {"records": 0, "steps": 0, "recorded": 0}

    class Watched(Runner):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            runs.append(self)

    def watch(report):
        r = runs[-1]
        kept = {index for q in r.issuer._queues.values() for index in list(q.records)}
        most["records"] = max(most["records"], len(kept))
        most["steps"] = max(most["steps"], len(r.issuer.steps))
        most["recorded"] = max(most["recorded"], len(r.on_records.__self__._steps))

    monkeypatch.setattr(generate, "Runner", Watched)
    engine.generate([[7]], 300, ignore_eos=True, on_step=watch)
    assert len(runs) == 2
    # Those that are bound, weights one ahead.
    assert 2 <= most["records"] <= UNRESOLVED + 1
    assert most["steps"] <= WINDOW
    assert most["recorded"] <= 8 + WINDOW + 1
    assert [len(t.steps) for t in engine.timelines] == [1, 8]
    assert len(engine.timelines[1]) == 8 * len(engine.timelines[1].graph)


# Any graph, with kernels that only write down when they ran.


def in_a_loop(graph: TaskGraph) -> TaskGraph:
    """``graph`` between a task that begins a step and one that ends it on the host."""
    first, last = TaskId("copy_rows", "decode"), TaskId("copy_tokens", "decode")
    data = Reason(EdgeKind.DATA, 0, "x")
    ends = [Edge(tasks[-1].id, last, data) for tasks in graph.lanes.values()]
    loop = Edge(last, first, Reason(EdgeKind.DATA, 1, "host_tokens", True))
    tasks = (Task(first, Lane.ACT), *graph.tasks, Task(last, Lane.ACT))
    # At random LANE edges join different lanes as well, which no builder makes.
    kept = [e for e in graph.edges if e.reason.kind is not EdgeKind.LANE]
    return TaskGraph(tasks, (*kept, *ends, loop))


class Noting:
    """Kernels that take a moment each and note step, start and end."""

    def __init__(self, graph, steps, seed):
        self.steps, self.rng, self.notes = steps, random.Random(seed), {}
        self.free = {t.id for t in graph if t.id.op == "t" and self.rng.random() < 0.3}
        self.bound = []

    def next_step(self, index):
        self.bound.append(index)
        return index if index < self.steps else None

    def needs_step(self, task):
        return task.id not in self.free

    def host_value(self, task, step):
        pass

    def is_empty(self, task, step):
        return False

    def run(self, task, index, step):
        assert step in (None, index)
        start = time.perf_counter()
        time.sleep(2e-4)
        self.notes[task.id, index] = start, time.perf_counter()


@pytest.mark.cpu
@pytest.mark.parametrize("seed", range(40))
def test_every_edge_is_kept_in_every_step(seed):
    steps = 2 * WINDOW + 1
    graph = in_a_loop(random_graph(np.random.default_rng(seed)))
    kernels, records = Noting(graph, steps, seed), {}
    Runner(
        graph,
        kernels,
        torch.device("cpu"),
        delays=RandomDelays(seed),
        on_records=lambda index, times: records.setdefault(index, times),
    ).run()
    assert kernels.bound == list(range(steps + 1))
    assert sorted(records) == list(range(steps))
    for index in range(steps):
        assert {t.task._replace(step=0) for t in records[index]} == {t.id for t in graph}
        for e in graph.edges:
            if index >= e.reason.distance:
                ended = kernels.notes[e.src, index - e.reason.distance][1]
                assert ended <= kernels.notes[e.dst, index][0], f"{e} in step {index}"
        for tasks in graph.lanes.values():
            order = [kernels.notes[t.id, index][0] for t in tasks]
            assert order == sorted(order)


@pytest.mark.cpu
def test_a_worker_can_be_waited_for_again_after_an_interrupt():
    """A real signal: before Python 3.13 it makes join() take a live thread for an ended one."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread alone")

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        ended = []
        worker = threads.Worker("slow", lambda: (time.sleep(1.0), ended.append(True)))
        worker.start()
        main = threading.main_thread().ident
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            worker.wait()
        assert not ended
        worker.wait()
        assert ended and not worker.is_alive()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.cpu
def test_an_interrupt_before_the_lanes_begin_leaves_none_behind(engine, monkeypatch):
    before, opened = threading.enumerate(), []
    open_streams = runner.open_streams

    def interrupted(*args):
        opened.append(open_streams(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "open_streams", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 6, ignore_eos=True)
    assert len(opened) == 1 and threading.enumerate() == before


@pytest.mark.cpu
def test_runs_that_overlap_leave_the_interpreter_as_it_was():
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    first, second = runner.undisturbed(), runner.undisturbed()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() <= 1e-4
    assert gc.get_threshold() == (*thresholds[:2], runner.FULL_COLLECTION)
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() <= 1e-4 and gc.get_threshold() != thresholds
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == interval and gc.get_threshold() == thresholds


@pytest.mark.cpu
def test_clocks_are_read_without_waiting_for_what_has_ended(engine, monkeypatch):
    """A wait lets go of the interpreter, however short it is."""
    events = lanes.CudaEvent if engine.device.type == "cuda" else lanes.CpuEvent
    ready, synchronize = [], events.synchronize

    def spied(self):
        if threading.current_thread().name in ("moegen-issue", "MainThread"):
            ready.append(self.ready())
        synchronize(self)

    monkeypatch.setattr(events, "synchronize", spied)
    engine.generate(PROMPTS, 6, ignore_eos=True)
    assert not any(ready)


@pytest.mark.cpu
def test_thresholds_that_the_caller_sets_during_a_run_stay(engine):
    thresholds = gc.get_threshold()
    ours = (thresholds[0] + 1, *thresholds[1:])
    try:
        engine.generate(PROMPTS, 3, on_finish=lambda *_: gc.set_threshold(*ours))
        assert gc.get_threshold() == ours
        gc.set_threshold(0)  # never at all
        with runner.undisturbed():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.cpu
@pytest.mark.parametrize("old", [1, 10**6])
def test_no_run_waits_until_all_objects_have_been_looked_through(engine, old):
    seen = []
    thresholds = gc.get_threshold()
    gc.set_threshold(50, 2, old)
    gc.callbacks.append(on := lambda phase, info: seen.append((phase, info["generation"])))
    try:
        with runner.undisturbed():
            assert gc.get_threshold()[2] == max(old, runner.FULL_COLLECTION)
            engine.generate(PROMPTS, 12, ignore_eos=True)
    finally:
        gc.callbacks.remove(on)
        gc.set_threshold(*thresholds)
    assert ("start", 1) in seen and ("start", 2) not in seen


def test_a_bell_waits_no_longer_than_asked_however_short():
    _Bell = issue._Bell

    began, rounds = time.perf_counter(), 0
    # What a queue of CPython's does not always survive; here it did not last for a second.
    ended = threading.Event()

    def wait():
        nonlocal rounds
        while time.perf_counter() - began < 2:
            _Bell().wait(1.5e-6)
            rounds += 1
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(30)
    assert rounds > 1000


def test_a_bell_rung_before_is_not_waited_for_and_rings_once():
    _Bell = issue._Bell

    bell = _Bell()
    bell.ring()
    bell.ring()
    began = time.perf_counter()
    bell.wait(20)
    assert time.perf_counter() - began < 10
    began = time.perf_counter()
    bell.wait(0.05)
    assert time.perf_counter() - began >= 0.04
    threading.Timer(0.05, bell.ring).start()
    began = time.perf_counter()
    bell.wait(20)
    assert time.perf_counter() - began < 10
