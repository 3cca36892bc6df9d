"""what_if(): a measured run with one part changed, against runs worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from handmade import edge, task, tid
from small_models import deepseek, mixtral

import moegen as mg
from moegen.errors import InvalidInput
from moegen.graph.shape import Shape
from moegen.graph.task import Lane, TaskGraph, Work
from moegen.sim.corrected import correct
from moegen.sim.cost import CostModel
from moegen.sim.scaled import Wrapped
from moegen.timeline import Timeline

matplotlib.use("agg")
C2 = mg.HardwareSpec.from_name("c2")
S = mg.Strategy(B=24, b_a=4, b_e=64, omega=0.25)


def as_measured(run: Timeline, shapes=()) -> Timeline:
    """A simulated run as if it had been measured."""
    meta = {"shapes": [shape.to_dict() for shape in shapes]} if shapes else {}
    return Timeline(run.graph, run.ids, run.start_s, run.end_s, source="measured", meta=meta)


def pipeline() -> TaskGraph:
    """A copy, and a kernel that waits for it."""
    copy = task("copy_expert", "BULK", Work(h2d_bytes=25e9))
    use = task("expert", "GPU", Work(gpu_bytes=1.0))
    return TaskGraph((copy, use), (edge("copy_expert", "expert"),))


def by_hand(copy_s: list[float], use_s: list[float]) -> Timeline:
    """Copies one after the other; each kernel begins when its copy and the one before end."""
    ids, start, end = [], [], []
    copied = used = 0.0
    for k, (c, u) in enumerate(zip(copy_s, use_s, strict=True)):
        ids += [tid("copy_expert", k), tid("expert", k)]
        start += [copied, max(copied + c, used)]
        copied += c
        used = start[-1] + u
        end += [copied, used]
    return Timeline(pipeline(), ids, start, end, source="measured")


def test_durations_come_out_as_measured_in_the_mean():
    # Of five steps the second to the fourth count: copies of 2, 3 and 4 s, kernels of 1 s.
    run = by_hand([9, 2, 3, 4, 9], [1, 1, 1, 1, 7])
    cost = CostModel.fixed({"copy_expert": 0.5, "expert": 8.0}).corrected(run)
    assert [cost.seconds(t) for t in pipeline()] == pytest.approx([3.0, 1.0], rel=1e-12)
    told = mg.what_if(run, CostModel.fixed({"copy_expert": 0.5, "expert": 8.0}), op={"expert": 2})
    assert told.base_s == pytest.approx(3.0, rel=1e-12)
    assert told.measured_s == run.period_s == 3.0
    assert told.period_s == pytest.approx(3.0, rel=1e-12)  # 2 s of kernels hide behind the copies
    assert told.change == pytest.approx(0.0, abs=1e-12)


def test_an_op_that_takes_another_time():
    run = by_hand([2, 2, 2, 2], [1, 1, 1, 1])
    cost = CostModel.fixed({"copy_expert": 2.0, "expert": 1.0})
    told = mg.what_if(run, cost, op={"copy_expert": 0.25})
    assert (told.base_s, told.period_s) == (2.0, 1.0)  # now the kernels bind
    assert told.change == -0.5 and told.gain == 1.0
    said = "copy_expert in 0.25 times the time: 2.00 s -> 1.00 s a step, -50% time, +100% tokens/s"
    assert str(told) == said
    slower = str(mg.what_if(run, cost, op={"expert": "x4"}))
    assert slower.endswith("2.00 s -> 4.00 s a step, +100% time, -50% tokens/s")


def test_a_link_twice_as_fast_by_hand():
    # 25 GB over c2's link of 25 GB/s: 1 s; measured 1.5 s, so 0.75 s on a link twice as fast.
    run = by_hand([1.5] * 4, [0.25] * 4)
    cost = CostModel.roofline(C2.with_(copy_latency_s=1e-30))
    told = mg.what_if(run, cost, link="x2")
    assert C2.h2d_bytes_per_s == 25e9
    assert told.base_s == pytest.approx(1.5, rel=1e-9)
    assert told.period_s == pytest.approx(0.75, rel=1e-9)
    said = "link twice as fast: 1.50 s -> 750 ms a step, -50% time, +100% tokens/s"
    assert str(told) == said
    told = mg.what_if(run, cost, h2d_bytes_per_s=75e9)
    assert mg.what_if(run, cost, h2d_bytes_per_s="75GB/s").period_s == told.period_s
    for factor in ("1.5", "0.9"):
        said = str(mg.what_if(run, cost, h2d_bytes_per_s=f"x{factor}"))
        assert said.startswith(f"link to the GPU {factor} times as fast: ")
    limit = C2.host_bytes_per_s  # host memory cannot give as much
    assert told.period_s == pytest.approx(1.5 * 25e9 / min(75e9, limit), rel=1e-9)
    # A rate that nothing here draws on changes nothing, to the last digit.
    assert mg.what_if(run, cost, cpu_attn_bytes_per_s="x2").period_s == told.base_s


@pytest.mark.parametrize("model", [mixtral(), deepseek()], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_run_of_one_machine_is_found_by_the_cost_of_another(model, phase):
    """Simulated on a machine with other rates, the corrected model has its durations."""
    lengths = [5 + 7 * (i % 5) for i in range(24)]
    g = mg.build(model, S, phase, lengths=lengths)
    truth = CostModel.roofline(
        C2.with_(h2d_bytes_per_s=11e9, gpu_bytes_per_s=3e11, cpu_attn_bytes_per_s=9e9)
    )
    run = as_measured(mg.simulate(g, truth, steps=5))
    cost = correct(CostModel.roofline(C2), run)
    again = mg.simulate(g, cost, steps=5)
    result = mg.compare(again, run)
    assert (result.by_op["error"].abs() < 1e-5).all()
    assert result.error == pytest.approx(0.0, abs=0.03)
    assert cost.by_work and "corrected" in repr(cost)
    frame = cost.to_frame()
    assert frame.loc["lm_head", "factor"] > 1 and (frame["phase"] == phase).all()
    # Of the other phase nothing was measured.
    other = mg.build(model, S, "prefill" if phase == "decode" else "decode", lengths=lengths)
    for t in other:
        assert cost.seconds(t) == CostModel.roofline(C2).seconds(t)


KNOBS = [
    {"omega": "+0.25"},
    {"omega": 0.0},
    {"b_a": 12},
    {"kv_slots": "+2"},
    {"dense_slots": 1},
    {"s_expert": "+1MiB"},
    {"expert_group": 2},
    {"s_params": "100kB"},
    {"fetch": "routed"},
]


@pytest.mark.parametrize("change", KNOBS, ids=str)
def test_a_knob_is_changed_as_if_the_run_had_had_it(change):
    """With the true cost model, the prediction is the other run itself, step by step."""
    model, cost = mixtral(), CostModel.roofline(C2)
    lengths = [5 + 7 * (i % 5) for i in range(24)]

    def run(s: mg.Strategy) -> Timeline:
        g = mg.build(model, s, "decode", lengths=lengths)
        counts = {k: (20, 12, 0, 2 * 23 - 32) for k in range(2)}
        shapes = [Shape(tuple(n + k for n in lengths), (1,) * 23 + (0,), counts) for k in range(4)]
        times = mg.simulate(g, cost, shapes=shapes)
        meta = {"shapes": [shape.to_dict() for shape in shapes]}
        start_s, end_s = times.start_s, times.end_s
        return Timeline(g, times.ids, start_s, end_s, source="measured", meta=meta)

    values = {"+0.25": 0.5, "+2": 4, "+1MiB": 2**20, "100kB": 10**5}
    now = {k: values.get(v, v) for k, v in change.items()}
    told = mg.what_if(run(S), cost, **change)
    assert told.base_s == pytest.approx(run(S).period_s, rel=1e-9)
    assert told.period_s == pytest.approx(run(S.with_(**now)).period_s, rel=1e-9)
    assert told.tokens == told.base_tokens == 23


@pytest.mark.parametrize("B", ["x2", 12, "-1", 100])
def test_another_batch_keeps_lengths_and_routing_in_proportion(B):
    model, cost = mixtral(), CostModel.roofline(C2)
    lengths = [10] * 12 + [30] * 12
    g = mg.build(model, S, "decode", lengths=lengths)
    shapes = [Shape(tuple(lengths), (1,) * 24, {0: (24, 12, 12, 0), 1: (12,) * 4})] * 3
    run = as_measured(mg.simulate(g.bind(shapes[0]), cost, steps=3), shapes=shapes)
    told = mg.what_if(run, cost, B=B)
    rows = {"x2": 48, "-1": 23}.get(B, B)
    got = told.predicted.graph
    assert got.layout.rows == got.strategy.B == told.tokens == rows and told.base_tokens == 24
    assert abs(sum(got.shape.past) / rows - 20) < 0.5 and sorted(got.shape.past) == list(
        got.shape.past
    )
    counts = got.shape.expert_tokens
    assert sum(counts[0]) == 2 * rows and counts[0][3] == 0
    assert np.allclose(counts[0], np.array([1.0, 0.5, 0.5, 0.0]) * rows, atol=1)
    assert told.gain == pytest.approx(rows / 24 * told.base_s / told.period_s - 1)
    assert str(told).endswith(f" time, {told.gain:+.0%} tokens/s")


def test_micro_batches_that_slots_cut_stay_cut():
    model, cost = mixtral(), CostModel.roofline(C2)
    g = mg.build(model, S.with_(b_a=24), "decode", lengths=[9] * 24, kv_slot_tokens=60)
    assert max(g.layout.micro_batches) == 6
    told = mg.what_if(as_measured(mg.simulate(g, cost, steps=3)), cost, kv_slots=3)
    assert told.predicted.graph.layout == g.layout


def test_several_changes_are_one_question():
    model, cost = mixtral(), CostModel.roofline(C2)
    run = as_measured(mg.simulate(mg.build(model, S, kv_len=40), cost, steps=4))
    told = mg.what_if(run, cost, omega="+0.25", launch_s="x0.5", op={"lm_head": 0.5})
    faster = CostModel.roofline(C2.with_(launch_s=C2.launch_s / 2))
    g = mg.build(model, S.with_(omega=0.5), kv_len=40)
    assert told.question == ("least time of a kernel x0.5, ω 0.25 -> 0.5, lm_head in half the time")
    assert told.period_s < mg.simulate(g, faster, steps=4).period_s < told.base_s


def test_sharing_counts():
    """Two copies that share a link: one of them gone from it, the other goes at full speed."""
    g = TaskGraph((task("fetch_kv", "KV"), task("copy_expert", "BULK")), ())
    cost = CostModel.fixed(
        {"fetch_kv": 1.0, "copy_expert": 1.0},
        demands={"fetch_kv": {"h2d": 1.0}, "copy_expert": {"h2d": 1.0}},
        capacities={"h2d": 1.0},
    )
    run = as_measured(mg.simulate(g, cost, steps=4))
    assert (run.end_s - run.start_s).tolist() == [2.0] * 8
    told = mg.what_if(run, cost, op={"fetch_kv": 0})
    assert (told.base_s, told.period_s) == (2.0, 1.0)


def test_questions_in_a_frame_the_best_first():
    run = by_hand([2.0] * 4, [1.0] * 4)
    cost = CostModel.roofline(C2)
    questions = [{"op": {"copy_expert": 2}}, {"link": "x2"}, {"omega": 0.5}]
    df = mg.what_ifs(run, cost, questions)
    assert df["question"].tolist() == [
        "link twice as fast",
        "copy_expert in twice the time",
        "omega 0.5",
    ]
    assert df["gain"].tolist()[:2] == pytest.approx([1.0, -0.5], abs=1e-3)
    assert df["error"].tolist()[:2] == ["", ""] and "made by hand" in df["error"][2]
    assert df["base_s"].tolist() == pytest.approx([2.0] * 3)
    ax = mg.plot.what_ifs(df)
    bars = {
        t.get_text(): bar.get_width()
        for t, bar in zip(ax.get_yticklabels(), ax.patches, strict=True)
    }
    assert bars == pytest.approx(
        {"link twice as fast": 100, "copy_expert in twice the time": -50}, rel=1e-3
    )
    with pytest.raises(InvalidInput, match="no question has an answer"):
        mg.plot.what_ifs(df[df["error"] != ""])


def test_a_corrected_model_plans_and_sweeps():
    model = mixtral()
    cost = CostModel.roofline(C2)
    run = as_measured(mg.simulate(mg.build(model, S, kv_len=40), cost, steps=4))
    corrected = cost.corrected(run)
    work = mg.Workload.uniform(n=24, prompt_len=16, gen_len=8)
    plan = mg.plan(model, C2, work, corrected)
    assert plan.time_s == pytest.approx(mg.plan(model, C2, work, cost).time_s, rel=1e-6)
    df = mg.sweep(model, C2, work, corrected, omega=[0, 0.5])
    assert (df["error"] == "").all()
    assert mg.bound_s(mg.build(model, S, kv_len=40), corrected) > 0
    assert corrected.domain().empty and corrected.hw == C2


RUN = by_hand([2.0] * 3, [1.0] * 3)
ROOF = CostModel.roofline(C2)
REFUSED = [
    ({}, "nothing is changed"),
    ({"omgea": 0.5}, "there is no 'omgea' to change; there are knobs: B, b_a"),
    ({"omega": 0.5}, "made by hand, of no model"),
    ({"op": {"exprt": 2}}, "the run has no op 'exprt'; it has copy_expert, expert"),
    ({"op": {"expert": -1}}, "the factor of expert must be a finite number of at least 0"),
    ({"op": 3}, "op must map ops to factors"),
    ({"link": 2}, 'link takes a factor above 0, such as "x2"'),
    ({"link": "x"}, "link takes a factor above 0, such as \"x2\", got 'x'"),
    ({"link": "xfast"}, "link takes a factor above 0, such as \"x2\", got 'xfast'"),
    ({"link": "xnan"}, "link takes a factor above 0, such as \"x2\", got 'xnan'"),
    ({"link": "+1"}, 'link takes a factor above 0, such as "x2"'),
    ({"gpu_memory_bytes": "x2"}, "no duration depends on gpu_memory_bytes"),
    ({"task_s": "x2"}, "task_s is None: give its new value"),
    (
        {"h2d_bytes_per_s": "fast"},
        'takes a number, a rate such as "25GB/s", or a change such as "x2"',
    ),
    ({"gpu_flops": "fast"}, "gpu_flops takes a number, or a change such as"),
    ({"h2d_bytes_per_s": -1.0}, "h2d_bytes_per_s"),
    # Of these the later one counted, and the answer said both.
    ({"link": "x2", "h2d_bytes_per_s": "x3"}, "link changes h2d_bytes_per_s too"),
    ({"h2d_bytes_per_s": "x3", "link": "x2"}, "link changes h2d_bytes_per_s too"),
    ({"op": {"exprt": 2, 3: 2}}, "the run has no op 'exprt'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_what_cannot_be_asked_is_refused_by_name(change, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        mg.what_if(RUN, ROOF, **change)


@pytest.mark.parametrize(
    ("knob", "change"),
    [("kv_slots", "+0.5"), ("B", "-1.5"), ("B", "x1e400"), ("B", "xnan"), ("B", "+inf"),
     ("s_expert", "x1e400")],
)  # fmt: skip
def test_a_count_changes_by_whole_numbers(knob, change):
    """A half was rounded away without a word, the others ended in tracebacks of Python."""
    real = as_measured(mg.simulate(mg.build(mixtral(), S, kv_len=9), ROOF, steps=3))
    with pytest.raises(InvalidInput, match=rf"{knob} is a whole number, \d+, and cannot change by"):
        mg.what_if(real, ROOF, **{knob: change})


def test_other_refusals():
    fixed = CostModel.fixed({"copy_expert": 0.0, "expert": 1.0})
    with pytest.raises(InvalidInput, match="the timeline was simulated"):
        mg.what_if(mg.simulate(pipeline(), ROOF, steps=3), ROOF, link="x2")
    with pytest.raises(InvalidInput, match="measured must be a Timeline"):
        mg.what_if("run.json", ROOF, link="x2")
    with pytest.raises(InvalidInput, match="copy_expert takes no time by the cost model"):
        fixed.corrected(RUN)
    fixed = CostModel.fixed({"copy_expert": 1.0, "expert": 1.0})
    with pytest.raises(InvalidInput, match="is of no machine"):
        mg.what_if(RUN, fixed, link="x2")
    with pytest.raises(InvalidInput, match="there is no question"):
        mg.what_ifs(RUN, ROOF, [])
    for changes in ({"link": "x2"}, None, "", [3], (c for c in [{"link": "x2"}])):
        with pytest.raises(InvalidInput, match="changes must be a list of mappings"):
            mg.what_ifs(RUN, ROOF, changes)
    with pytest.raises(InvalidInput, match="cost must be a CostModel"):
        mg.what_if(RUN, C2, link="x2")
    real = as_measured(mg.simulate(mg.build(mixtral(), S, kv_len=9), ROOF, steps=3))
    for change, said in (
        ({"omega": 2}, "lies in"),
        ({"kv_slots": "-2"}, "kv_slots must be"),
        ({"B": "x1e9"}, "B must be at most"),
    ):
        with pytest.raises(InvalidInput, match=said):
            mg.what_if(real, ROOF, **change)


def test_a_knob_that_says_nothing_of_a_run_is_refused():
    """The answer was that nothing changes."""
    real = as_measured(mg.simulate(mg.build(mixtral(), S, kv_len=9), ROOF, steps=3))
    n = max(layer.n_experts for layer in mixtral().layers)
    said = f"expert_group is {n + 1}, and a layer of .* has {n} experts: at most {n} can"
    with pytest.raises(InvalidInput, match=said):
        mg.what_if(real, ROOF, expert_group=n + 1)
    assert mg.what_if(real, ROOF, expert_group=n).period_s > 0
    wave = as_measured(mg.simulate(mg.build(mixtral(), S, "prefill", prompt_len=9), ROOF, steps=3))
    with pytest.raises(InvalidInput, match=r"omega .* has no effect on a prefill run: .* for 0.5"):
        mg.what_if(wave, ROOF, omega=0.5)
    df = mg.what_ifs(wave, ROOF, [{"omega": 0.5}, {"b_a": 8}])
    assert df["error"].tolist()[0] == "" and "no effect on a prefill run" in df["error"][1]


def test_what_has_nothing_to_do_by_its_shape_may_take_a_moment():
    """Rows without KV yet: fetching none of it takes a run a moment, and no factor gives that."""
    g = mg.build(mixtral(), S, lengths=[0] * 8)
    assert all(t.work.empty for t in g if t.id.op == "fetch_kv")
    truth = Moment(CostModel.roofline(C2.with_(h2d_bytes_per_s=11e9)))
    run = as_measured(mg.simulate(g, truth, steps=5))
    assert {t.id.op for t in run.tasks} >= {"fetch_kv", "copy_expert"}
    cost = correct(CostModel.roofline(C2), run)
    assert cost.factors["fetch_kv", "decode", Lane.KV] == 1.0
    # What has something to do and takes no time is refused all the same.
    free = CostModel.fixed(
        {t.id: 0.0 if t.id.op == "copy_expert" else 1.0 for t in mg.build(mixtral(), S, kv_len=9)}
    )
    with pytest.raises(InvalidInput, match="copy_expert takes no time by the cost model, and"):
        correct(free, as_measured(mg.simulate(mg.build(mixtral(), S, kv_len=9), truth, steps=3)))


class Moment(Wrapped):
    """Another cost model; what has nothing to do takes 30 us."""

    def estimate(self, task):
        cost = self.of.estimate(task)
        return replace(cost, seconds=3e-5) if task.work.empty else cost
