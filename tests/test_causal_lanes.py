"""Delays, what-ifs and spread of runs on CPU lanes: loose, for the machine is shared."""

from __future__ import annotations

import time

import matplotlib
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import tiny_mixtral  # noqa: E402

import moegen as mg  # noqa: E402
from moegen.exec.lanes import Clock, open_streams, prepare_delays  # noqa: E402
from moegen.graph.task import Lane  # noqa: E402
from moegen.sim.cost import CostModel  # noqa: E402
from tests.documents import Document  # noqa: E402

matplotlib.use("agg")

pytestmark = pytest.mark.cpu
S = mg.Strategy(B=8, b_a=2, b_e=64, omega=0.5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path, _ = tiny_mixtral(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    with mg.Engine.from_pretrained(path, device="cpu", dtype="float32") as e:
        yield e


@pytest.fixture(scope="module")
def graph(engine):
    return mg.build(engine.model, S, kv_len=40)


@pytest.fixture(scope="module")
def cost(engine, graph):
    """The roofline of any machine, corrected by a run on this one."""
    run = engine.execute(graph, 8)
    return CostModel.roofline(mg.HardwareSpec.from_name("c2")).corrected(run)


def test_what_concepts_says_of_delays_and_spread_runs(engine, tmp_path, monkeypatch, capsys):
    blocks = Document("docs/concepts.md").code("py")
    causal, spread = (next(b for b in blocks if x in b) for x in ("mg.causal(", "mg.Spread.of("))
    monkeypatch.chdir(tmp_path)
    # What moegen profile would leave, of another machine.
    measured = CostModel.from_profile("h200", hw=mg.HardwareSpec.from_name("h200"))
    monkeypatch.setattr(mg.CostModel, "from_profile", {"here.json": measured}.__getitem__)

    class Opened:
        def __enter__(self):
            return engine

        def __exit__(self, *_):
            """Other tests use it too."""

    monkeypatch.setattr(mg.Engine, "from_pretrained", lambda *_, **__: Opened())
    names = {"mg": mg}
    for text in (causal, spread):
        exec(compile(text, "docs/concepts.md", "exec"), names)
    names |= {"measured": names["runs"][0], "cost": names["known"]}
    exec(next(b for b in blocks if ".corrected(measured)" in b), names)
    said = capsys.readouterr().out
    assert "running 109 steps: 2 ops" in said and "measured_slope" in said
    assert "<Uncertainty period" in said and "s a step" in said
    assert (tmp_path / "slopes.png").stat().st_size > 10_000


def test_a_run_says_how_long_its_delays_were(engine, graph):
    class Held:
        def issue_s(self, task, index):
            return 0.0

        def run_s(self, task, index):
            return 2e-3 if task.id.op == "pre_attn" and index == 1 else 0.0

    run = engine.execute(graph, 3, delays=Held())
    assert list(run.meta["delayed_s"]) == ["pre_attn"]
    before, held, after = run.meta["delayed_s"]["pre_attn"]
    assert before == after == 0.0 and 4e-3 <= held < 0.1
    assert "delayed_s" not in engine.execute(graph, 2).meta


def test_a_run_with_delays_is_prepared_for_them_before_its_lanes_open(engine, graph, monkeypatch):
    from moegen.exec import runner

    seen = []
    opened = runner.open_streams
    monkeypatch.setattr(runner, "prepare_delays", lambda device: seen.append(device.type))
    monkeypatch.setattr(runner, "open_streams", lambda *a: seen.append("opened") or opened(*a))

    class NotHeld:
        def issue_s(self, task, index):
            return 0.0

        run_s = issue_s

    engine.execute(graph, 1)
    assert seen == ["opened"]
    engine.execute(graph, 1, delays=NotHeld())
    assert seen == ["opened", "cpu", "opened"]


def test_a_class_that_binds_and_one_with_slack(engine, graph, cost):
    """Each layer's products are on the only way through a step, and so is the one lm_head.

    New rows of KV are wanted a whole step later: there is slack for them.
    """
    delay_s = {"pre_attn": 10e-3, "lm_head": 20e-3, "append_kv": 1e-3}
    df = mg.causal(engine, graph, cost, list(delay_s), delay_s, steps=8, rounds=3).set_index("op")
    assert df["tasks"].to_dict() == {"pre_attn": 2, "lm_head": 1, "append_kv": 2}
    for op, n in (("pre_attn", 2), ("lm_head", 1)):
        of = df.loc[op]
        assert of["measured_slope"] == pytest.approx(n, abs=max(0.4 * n, 5 * of["se"]))
    assert df.loc["pre_attn", "predicted_slope"] == pytest.approx(2.0, abs=0.2)
    assert df.loc["lm_head", "predicted_slope"] == pytest.approx(1.0, abs=0.1)
    assert df.loc[["pre_attn", "lm_head"], "binds"].all()
    assert not df.loc["append_kv", "binds"]
    slack = df.loc["append_kv"]
    assert abs(slack["measured_slope"]) < max(1.0, 5 * slack["se"])
    assert df.loc["append_kv", "predicted_slope"] == pytest.approx(0.0, abs=0.5)


def test_a_delay_holds_back_its_lane_alone_and_not_the_caller():
    device = torch.device("cpu")
    streams = open_streams(device, Clock(device), lambda e: None)
    try:
        began = time.perf_counter()
        streams[Lane.BULK].delay(0.2)
        behind = streams[Lane.BULK].record()
        beside = streams[Lane.ACT].record()
        assert time.perf_counter() - began < 0.1
        beside.synchronize()
        assert not behind.ready()
        behind.synchronize()
        assert behind.time_s() - beside.time_s() > 0.1
    finally:
        for stream in streams.values():
            stream.close()


@pytest.mark.gpu
def test_a_delay_on_the_copy_lane_holds_its_copy_and_no_other():
    """On a GPU: as long as it was asked for, and the copy engine is free for others meanwhile."""
    device = torch.device("cuda", 0)
    streams = open_streams(device, Clock(device), lambda e: None)
    there = {lane: torch.empty(1 << 20, device=device) for lane in (Lane.BULK, Lane.KV)}
    host = torch.ones(1 << 20).pin_memory()

    def copied(lane):
        streams[lane].submit(lambda: there[lane].copy_(host, non_blocking=True))
        return streams[lane].record()

    try:
        for lane in there:  # what is first is slow
            copied(lane).synchronize()
        prepare_delays(device)
        held_s = []
        for seconds in (1e-3, 1e-4, 1e-2, 1e-3, 1e-3, 1e-3):
            streams[Lane.BULK].delay(5e-3)  # meanwhile all that follows is launched
            began = streams[Lane.BULK].record()
            called = time.perf_counter()
            streams[Lane.BULK].delay(seconds)
            assert time.perf_counter() - called < 5e-3  # what it counts in is known
            held = streams[Lane.BULK].record()
            behind, beside = copied(Lane.BULK), copied(Lane.KV)
            for event in (behind, beside):
                event.synchronize()
            held_s.append(held.time_s() - began.time_s())
            assert held_s[-1] >= 0.99 * seconds  # more, where others have the GPU meanwhile
            assert behind.time_s() >= held.time_s()
            assert seconds < 5e-3 or beside.time_s() < held.time_s()
        assert min(s for s in held_s if s > 9e-4) == pytest.approx(1e-3, rel=0.05)
    finally:
        for stream in streams.values():
            stream.close()


def test_more_slots_as_predicted_and_as_executed(engine, graph, cost):
    """Steps of a model as small are mostly host code: the change is compared, not the time."""
    more = mg.build(engine.model, S.with_(kv_slots=4), kv_len=40)
    runs = [(engine.execute(graph, 12), engine.execute(more, 12)) for _ in range(6)]
    roof = CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    told = mg.what_if(min((a for a, _ in runs), key=lambda r: r.period_s), roof, kv_slots="+2")
    assert told.predicted.graph.structure_hash == more.structure_hash
    # Of the quickest run the median step: others use the machine too.
    before, after = (
        min(float(np.median(np.diff(run.step_end_s))) for run in some)
        for some in zip(*runs, strict=True)
    )
    changed = after / before
    assert 0.5 < told.period_s / told.base_s / changed < 2.0
    assert 0.2 < told.base_s / told.measured_s <= 1.5


def test_a_run_of_mixed_lengths_and_its_own_routing(engine):
    prompts = [[3 + i % 50 for i in range(n)] for n in (33, 1, 64, 5, 17, 40)]
    engine.generate(prompts, [6, 3, 6, 6, 2, 6], ignore_eos=True)
    roof = CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    for run in (engine.timelines[0], engine.timelines[-1]):
        cost = roof.corrected(run)
        assert all(f > 0 for f in cost.factors.values())
        told = mg.what_if(run, roof, omega=0.5) if run.graph.phase == "decode" else None
        assert told is None or (told.period_s > 0 and told.tokens == told.base_tokens)
        assert mg.what_if(run, roof, op={"expert": 1.0}).change == 0.0
    phases = {run.graph.phase for run in engine.timelines}
    assert phases == {"prefill", "decode"}


def test_questions_in_the_docs_have_answers(engine, graph, capsys):
    """Of a run that was saved and loaded, as `moegen run --timeline` leaves it."""
    from tests.documents import Document

    run = mg.Timeline.from_dict(engine.execute(graph, 6).to_dict())
    (block,) = (b for b in Document("docs/concepts.md").code("py") if "mg.what_if(" in b)
    exec(block, {"mg": mg, "hw": mg.HardwareSpec.from_name("c2"), "measured": run})
    link, knobs, op, head, *several = capsys.readouterr().out.splitlines()
    assert link.startswith("link twice as fast: ") and "%" in link
    assert knobs.startswith("ω 0.5 -> 0.6, kv_slots 2 -> 4: ")
    assert op.startswith("expert in half the time: ")
    assert head.split() == ["question", "answer"] and len(several) == 3
    assert all("% time, " in line and "tokens/s" in line for line in several)


def test_spread_of_runs(engine, graph, cost):
    spread = mg.Spread.of([engine.execute(graph, 6) for _ in range(3)])
    assert {"expert", "attn_cpu", "lm_head"} <= spread.each.keys()
    assert all(0 <= v < 10 for v in (*spread.each.values(), *spread.common.values()))
    u = mg.uncertainty(graph, cost, spread, samples=200)
    low, high = u.interval_s()
    assert low < u.quantile(0.5) < high
