"""estimate_job(): the time of a whole job against simulating every step of it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import deepseek, mixtral

import moegen as mg
from moegen.graph.shape import Shape
from moegen.graph.waves import deal, room
from moegen.sim import rounds, step_times
from moegen.sim.cost import Cost, CostModel
from moegen.sim.job import JobEstimate, estimate_job
from moegen.sim.rounds import MOST_BATCHES, Queue, course
from moegen.sim.runs import TOLERANCE

ROOFLINE = CostModel.roofline(mg.HardwareSpec.from_name("c2"))
OPS = {
    task.id.op
    for model in (mixtral(), deepseek())
    for phase in ("decode", "prefill")
    for task in mg.build(
        model, mg.Strategy(B=4, b_a=1, b_e=8, omega=0.5), phase, lengths=[4, 4, 4, 4]
    )
}


def only(**seconds: float) -> CostModel:
    """Every task takes no time but those named, by op."""
    return CostModel.fixed(dict.fromkeys(OPS, 0.0) | seconds)


def plan_of(model: mg.ModelSpec, B: int, prefill: int, **fields) -> mg.Plan:
    s = mg.Strategy(B=B, b_a=3, b_e=64, s_expert=4 * model.expert_bytes).with_(**fields)
    return mg.Plan(prefill=s.with_(B=prefill, omega=0.0), decode=s)


def every_step(model, plan, prompts, gens, cost, shared, refill=False) -> JobEstimate:
    """The same job with each of its steps simulated at its own shape, none left out."""

    def run(graph, shapes) -> float:
        steps, bound = graph.unroll(len(shapes)), [graph.bind(shape) for shape in shapes]
        tasks = [replace(t, work=bound[t.id.step][t.id._replace(step=0)].work) for t in steps.tasks]
        return mg.simulate(steps.with_tasks(tasks, None), cost, shared=shared).makespan_s

    prefill_s = decode_s = 0.0
    waves = steps = 0
    most = room(plan.prefill, mg.Workload.from_lengths(prompts, gens), plan.decode.B)
    queue, live = [[p, 1, g] for p, g in zip(prompts, gens, strict=True)], []
    while queue or live:
        places = plan.decode.B - len(live) if refill or not live else 0
        new, queue = queue[:places], queue[places:]
        if new:
            prompt_lens = [row[0] for row in new]
            dealt = deal(prompt_lens, most)
            lengths = dealt.lengths(prompt_lens).tolist()
            shapes = [Shape((0,) * len(wave), tuple(wave)) for wave in lengths]
            s = plan.prefill.with_(b_a=dealt.part_rows)
            prefill_s += run(mg.build(model, s, "prefill", lengths=lengths[0]), shapes)
            waves += len(shapes)
        live = [row for row in live + new if row[1] < row[2]]
        if not live:
            continue
        graph = mg.build(model, plan.decode, lengths=[p + out - 1 for p, out, _ in live])
        shapes = []
        while going := [row for row in live if row[1] < row[2]]:
            if shapes and len(going) <= len(live) / 2:
                break
            past = tuple(p + out - 1 if out < g else 0 for p, out, g in live)
            shapes.append(Shape(past, tuple(int(out < g) for _, out, g in live)))
            for row in going:
                row[1] += 1
        decode_s += run(graph, shapes)
        steps += len(shapes)
        live = going
    return JobEstimate(
        0.0, prefill_s, decode_s, waves, steps, len(prompts), sum(prompts), sum(gens)
    )


def random_job(n: int, seed: int = 0, longest: int = 400, most: int = 12):
    random = np.random.default_rng(seed)
    return random.integers(1, longest, n).tolist(), random.integers(1, most, n).tolist()


def near(estimate: JobEstimate, exact: JobEstimate, within: float) -> bool:
    same = ("prefill_waves", "decode_steps", "prompt_tokens", "gen_tokens")
    assert [getattr(estimate, n) for n in same] == [getattr(exact, n) for n in same]
    assert estimate.prefill_s == pytest.approx(exact.prefill_s, rel=within)
    assert estimate.decode_s == pytest.approx(exact.decode_s, rel=within)
    return True


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
def test_it_is_what_every_step_together_takes(omega, shared):
    for model in (mixtral(), deepseek()):
        plan = plan_of(model, B=9, prefill=4, omega=omega)
        prompts, gens = random_job(20)
        estimate = estimate_job(model, plan, (prompts, gens), ROOFLINE, shared=shared)
        # Tiny widths are all latencies, in which dropping a micro-batch is a jump.
        assert near(estimate, every_step(model, plan, prompts, gens, ROOFLINE, shared), 0.03)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name, n_layers", [("mixtral-8x7b", 10), ("gpt-oss-20b", 12)])
def test_layers_left_out_cost_what_the_others_cost(name, n_layers, shared):
    model = mg.ModelSpec.from_pretrained(name).with_(n_layers=n_layers)
    plan = plan_of(model, B=6, prefill=3, omega=0.5, s_expert=8 * model.expert_bytes)
    prompts, gens = random_job(6, most=6)
    estimate = estimate_job(model, plan, (prompts, gens), ROOFLINE, shared=shared)
    assert near(estimate, every_step(model, plan, prompts, gens, ROOFLINE, shared), 0.01)


def test_leading_dense_layers_are_not_multiplied():
    model = deepseek(num_hidden_layers=14, first_k_dense_replace=3)
    plan = plan_of(model, B=4, prefill=4)
    estimate = estimate_job(model, plan, ([5] * 4, [3] * 4), only(dense_mlp=1.0), shared=False)
    assert (estimate.prefill_s, estimate.decode_s) == (3.0, 6.0)
    estimate = estimate_job(model, plan, ([5] * 4, [3] * 4), only(shared_expert=1.0), shared=False)
    assert (estimate.prefill_s, estimate.decode_s) == (11.0, 22.0)


@pytest.mark.parametrize("kept", [0.4, 1.0])
def test_weights_that_stay_on_the_gpu_stay_when_layers_are_left_out(kept):
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=10)
    plan = plan_of(model, B=6, prefill=6, s_params=int(kept * model.weight_bytes))
    prompts, gens = random_job(6, most=4)
    estimate = estimate_job(model, plan, (prompts, gens), ROOFLINE)
    assert near(estimate, every_step(model, plan, prompts, gens, ROOFLINE, True), 0.01)


# Worked out by hand.


def test_steps_and_waves_are_counted_as_they_run():
    model = mixtral()
    plan = plan_of(model, B=4, prefill=2)
    # Batches of 4, 4 and 1: waves 2, 2 and 1; steps as many as the longest row has tokens
    # after the first, which comes from prefill.
    gens = [3, 1, 2, 5, 1, 1, 1, 1, 2]
    estimate = estimate_job(model, plan, ([7] * 9, gens), only(lm_head=1.0))
    assert estimate.prefill_waves == estimate.prefill_s == 5
    assert estimate.decode_steps == estimate.decode_s == 4 + 0 + 1
    assert (estimate.prompt_tokens, estimate.gen_tokens) == (63, 17)
    assert estimate.time_s == 10.0


def test_a_layout_begins_with_nothing_prefetched():
    # A copy takes 1 s, a kernel too, 2 layers x 4 experts of each. The first kernel of a layout
    # waits for its copy: 9 s. Then copies are ahead of kernels: 8 s for every other step.
    model = mixtral()
    plan = plan_of(model, B=4, prefill=4)
    cost = only(copy_expert=1.0, expert=1.0)
    uniform = estimate_job(model, plan, ([7] * 4, [6] * 4), cost, shared=False)
    assert uniform.prefill_s == 9.0
    assert uniform.decode_s == 5 * 8.0 + 1  # one layout
    # 8, 1, 11 and 3 steps: half have ended after 3, one of the two left after 8.
    estimate = estimate_job(model, plan, ([7] * 4, [9, 2, 12, 4]), cost, shared=False)
    assert estimate.decode_s == 11 * 8.0 + 3


def test_rows_that_ended_are_not_attended_to():
    # A row costs a second a step while it lives: 3 rows for 4 steps, then 2 of 3 for 6 more.
    class ByRow(CostModel):
        def estimate(self, task):
            attends = task.id.op == "attn_cpu" and task.id.layer == 0
            return Cost(float(task.work.rows if attends else 0), "given")

        def capacities(self, in_use=()):
            return {}

    model = mixtral()
    plan = plan_of(model, B=3, prefill=3, omega=1.0)
    estimate = estimate_job(model, plan, ([5, 5, 5], [5, 11, 11]), ByRow())
    assert estimate.decode_s == pytest.approx(3 * 4 + 2 * 6, rel=0.1)
    assert estimate.decode_steps == 10


# Properties.

lengths = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5)), min_size=1, max_size=6)


def time_s(rows, **fields) -> float:
    model = mixtral()
    prompts, gens = zip(*rows, strict=True)
    plan = plan_of(model, B=4, prefill=2, **fields)
    return estimate_job(model, plan, (prompts, gens), ROOFLINE, shared=False).time_s


@settings(max_examples=8)
@given(rows=lengths, more=st.integers(1, 20), omega=st.sampled_from([0.0, 0.5, 1.0]))
def test_more_tokens_are_never_cheaper(rows, more, omega):
    # All rows together: a single row may save a new layout by going on. Longer prompts may move
    # a row from one side to the other, and each of two estimates may be off.
    before = time_s(rows, omega=omega)
    assert time_s([(p, g + more) for p, g in rows], omega=omega) > before
    assert time_s([(p + more, g) for p, g in rows], omega=omega) >= before * (1 - 2 * TOLERANCE)


@settings(max_examples=10)
@given(rows=lengths)
def test_another_batch_is_never_free(rows):
    full = rows[: len(rows) // 4 * 4]
    assert time_s([*full, (10, 3)]) > (time_s(full) if full else 0.0)


def test_batches_alike_take_as_long_as_one_each():
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4, omega=0.5)
    prompts, gens = random_job(8)
    one = estimate_job(model, plan, (prompts, gens), ROOFLINE)
    many = estimate_job(model, plan, (prompts * 50, gens * 50), ROOFLINE)
    assert many.time_s == pytest.approx(50 * one.time_s, rel=0.03)
    assert many.decode_steps == 50 * one.decode_steps


def test_a_long_job_is_estimated_from_a_few_of_its_steps(monkeypatch):
    calls = []
    simulate = step_times.simulate
    monkeypatch.setattr(step_times, "simulate", lambda *a: calls.append(len(a[0])) or simulate(*a))
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    plan = plan_of(model, B=300, prefill=40, omega=0.5, b_a=64)
    prompts, gens = random_job(3001, most=200)
    estimate = estimate_job(model, plan, (prompts, gens), ROOFLINE)
    assert estimate.decode_steps > 1500 and estimate.prefill_waves == 81
    assert len(calls) < 40 and max(calls) < 300


def test_what_is_left_out_is_interpolated():
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4, omega=0.5)
    prompts, gens = random_job(8 * 16, most=20)
    estimate = estimate_job(model, plan, (prompts, gens), ROOFLINE, shared=False)
    every = [
        estimate_job(model, plan, (prompts[i : i + 8], gens[i : i + 8]), ROOFLINE, shared=False)
        for i in range(0, len(prompts), 8)
    ]
    assert estimate.prefill_s == pytest.approx(sum(e.prefill_s for e in every), rel=0.05)
    assert estimate.decode_s == pytest.approx(sum(e.decode_s for e in every), rel=0.05)


def test_many_experts_go_together(monkeypatch):
    sizes = []
    simulate = step_times.simulate
    monkeypatch.setattr(step_times, "simulate", lambda *a: sizes.append(len(a[0])) or simulate(*a))
    model = deepseek(num_hidden_layers=12, n_routed_experts=32)
    plan = plan_of(model, B=6, prefill=6, omega=0.3, s_expert=32 * model.expert_bytes)
    prompts, gens = random_job(6, most=3)
    hosted = CostModel.roofline(mg.HardwareSpec.from_name("c2").with_(task_s=1e-4))
    for cost in (ROOFLINE, hosted):
        estimate = estimate_job(model, plan, (prompts, gens), cost, shared=False)
        assert near(estimate, every_step(model, plan, prompts, gens, cost, False), 0.01)
    # Two of them are one task: of 11 layers with 32 each, a copy and an MLP for every one.
    assert max(sizes) < 11 * 32


# Histograms.


def test_rows_of_one_length_are_the_same_as_a_histogram_and_one_by_one():
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4, omega=0.5)
    one_by_one = estimate_job(model, plan, ([30] * 21, [9] * 21), ROOFLINE)
    assert estimate_job(model, plan, mg.Workload.uniform(21, 30, 9), ROOFLINE) == one_by_one


def test_the_order_of_groups_makes_no_difference_and_nothing_is_left_to_chance():
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4, omega=0.5)
    groups = ((30, 9, 7), (5, 40, 9), (100, 2, 11), (7, 7, 1))
    estimates = [
        estimate_job(model, plan, mg.Workload(order), ROOFLINE) for order in (groups, groups[::-1])
    ]
    assert pickle.dumps(estimates[0]) == pickle.dumps(estimates[1])


def test_a_histogram_goes_through_the_steps_of_its_rows_in_a_random_order():
    work = mg.Workload.lognormal(2000, 512, 60, prompt_sigma=0.5, gen_sigma=0.5)

    def steps(job, refill: bool) -> int:
        rounds = course(Queue.of(job, 64), refill).rounds
        return sum(layout.steps for r in rounds for layout in r.layouts)

    def shuffled(seed: int):
        order = np.random.default_rng(seed).permutation(work.n)
        return tuple(lengths[order] for lengths in work.lengths)

    for refill in (False, True):
        expected = np.mean([steps(shuffled(seed), refill) for seed in range(10)])
        assert steps(work, refill) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("omega", [0.0, 0.5])
def test_more_rows_never_take_less_time(omega):
    model = mixtral()
    plan = plan_of(model, B=6, prefill=2, omega=omega)
    times = [
        estimate_job(model, plan, mg.Workload.uniform(n, 30, 5), ROOFLINE).time_s
        for n in range(1, 20)
    ]
    assert all(a < b for a, b in zip(times, times[1:], strict=False))


def test_a_huge_job_is_looked_at_in_part():
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4, omega=0.5)
    work = mg.Workload.lognormal(8 * 400 + 3, 40, 12, prompt_sigma=0.5, gen_sigma=0.5)
    rows = tuple(x[np.random.default_rng(0).permutation(work.n)] for x in work.lengths)
    for job in (work, rows):
        assert len(Queue.of(job, 8).rows) == 8 * MOST_BATCHES + 3
    for refill in (False, True):
        assert course(Queue.of(work, 8), refill).times.sum() >= 400
        estimate = estimate_job(model, plan, work, ROOFLINE, refill=refill)
        million = mg.Workload(tuple((p, g, 10**6 * n) for p, g, n in work.groups))
        many = estimate_job(model, plan, million, ROOFLINE, refill=refill)
        assert many.time_s == pytest.approx(10**6 * estimate.time_s, rel=0.02)
        assert many.decode_steps == pytest.approx(10**6 * estimate.decode_steps, rel=0.02)


def test_batches_that_are_left_out_are_like_those_that_are_not(monkeypatch):
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4, omega=0.5)
    prompts, gens = random_job(8 * 300 + 5)
    some = estimate_job(model, plan, (prompts, gens), ROOFLINE)
    monkeypatch.setattr(rounds, "MOST_BATCHES", 10**6)
    all_ = estimate_job(model, plan, (prompts, gens), ROOFLINE)
    assert (some.prompt_tokens, some.gen_tokens) == (all_.prompt_tokens, all_.gen_tokens)
    assert some.time_s == pytest.approx(all_.time_s, rel=0.01)
    assert some.decode_steps == pytest.approx(all_.decode_steps, rel=0.01)


# What if places were given to the next rows.


def test_refilled_rounds_worked_out_by_hand():
    # Places for 2. Rows of 4 and 1 steps: after 1 the second place is free, and the third row,
    # of 1 step, takes it; after its step the fourth does; the last step is the first row's.
    model = mixtral()
    plan = plan_of(model, B=2, prefill=2)
    job = ([7] * 4, [5, 2, 2, 2])
    estimate = estimate_job(model, plan, job, only(lm_head=1.0), refill=True)
    assert (estimate.prefill_waves, estimate.decode_steps) == (3, 4)
    assert estimate.time_s == 7.0
    assert estimate_job(model, plan, job, only(lm_head=1.0)).decode_steps == 5


@pytest.mark.parametrize("omega", [0.0, 0.5])
def test_refilled_it_is_what_every_step_together_takes(omega):
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=3)
    plan = plan_of(model, B=16, prefill=6, omega=omega, b_a=4)
    prompts, gens = random_job(48)
    estimate = estimate_job(model, plan, (prompts, gens), ROOFLINE, shared=False, refill=True)
    exact = every_step(model, plan, prompts, gens, ROOFLINE, False, refill=True)
    assert near(estimate, exact, 0.01)


def test_refilling_pays_where_answers_differ_and_changes_nothing_where_they_do_not():
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    plan = plan_of(model, B=200, prefill=64, b_a=64)
    times = {}
    for sigma in (0.0, 0.8):
        work = mg.Workload.lognormal(1000, 100, 100, prompt_sigma=0, gen_sigma=sigma)
        for refill in (False, True):
            estimate = estimate_job(model, plan, work, ROOFLINE, shared=False, refill=refill)
            times[sigma, refill] = estimate.time_s
    assert times[0.0, True] == pytest.approx(times[0.0, False], rel=1e-9)
    assert times[0.8, True] < 0.8 * times[0.8, False]


# What else it says.


def test_loading_takes_as_long_as_its_rate_says_and_is_left_out_openly():
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4)
    job = ([30] * 8, [9] * 8)
    without = estimate_job(model, plan, job, ROOFLINE)
    assert without.load_s == 0 and "loading the model is left out" in without.notes[0]
    loaded = estimate_job(model, plan, job, ROOFLINE, load_bytes_per_s=1e6)
    assert loaded.load_s == model.weight_bytes / 1e6 and loaded.notes == ()
    assert loaded.time_s == pytest.approx(loaded.load_s + without.time_s, rel=1e-12)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(mg.InvalidInput, match="load_bytes_per_s"):
            estimate_job(model, plan, job, ROOFLINE, load_bytes_per_s=wrong)


@pytest.mark.parametrize("refill", [False, True])
def test_a_timeline_is_the_job_from_its_beginning_to_its_end(refill):
    model = mixtral()
    plan = plan_of(model, B=8, prefill=4, omega=0.5)
    prompts, gens = random_job(30, most=40)
    estimate = estimate_job(
        model, plan, (prompts, gens), ROOFLINE, refill=refill, load_bytes_per_s=1e6
    )
    frame = estimate.timeline()
    begins, ends = frame["time_s"], frame["time_s"] + frame["duration_s"]
    assert begins[0] == pytest.approx(estimate.load_s)
    assert begins[1:].tolist() == pytest.approx(ends[:-1].tolist())
    assert ends.iloc[-1] == pytest.approx(estimate.time_s)
    of = {phase: part for phase, part in frame.groupby("phase")}
    for phase, tokens, steps in (
        ("prefill", sum(prompts), estimate.prefill_waves),
        ("decode", sum(gens) - len(gens), estimate.decode_steps),
    ):
        done = of[phase]["duration_s"] * of[phase]["tokens_per_s"]
        assert done.sum() == pytest.approx(tokens)
        assert of[phase]["steps"].sum() == steps
        assert (of[phase]["rows"] <= 8).all()
    attended = sum(g * (g - 1) // 2 + p * (g - 1) for p, g in zip(prompts, gens, strict=True))
    each = of["decode"]["steps"] * of["decode"]["rows"] * of["decode"]["context"]
    assert each.sum() == pytest.approx(attended)
    assert estimate.prefill_tokens_per_s == pytest.approx(sum(prompts) / estimate.prefill_s)
    assert estimate.decode_tokens_per_s == pytest.approx(
        (sum(gens) - len(gens)) / estimate.decode_s
    )


def test_no_rows_take_no_time():
    model = mixtral()
    estimate = estimate_job(model, plan_of(model, B=4, prefill=2), ([], []), ROOFLINE)
    assert estimate == JobEstimate(0.0, 0.0, 0.0, 0, 0, 0, 0, 0, estimate.notes)
    assert estimate.time_s == 0.0


def test_lengths_that_are_none_are_refused():
    model = mixtral()
    plan = plan_of(model, B=4, prefill=2)
    with pytest.raises(mg.InvalidInput, match="equally long, got 2 and 1"):
        estimate_job(model, plan, ([3, 3], [1]), ROOFLINE)
    with pytest.raises(mg.InvalidInput, match="gen_lens\\[1\\] must be a whole number of at"):
        estimate_job(model, plan, ([3, 3], [1, 0]), ROOFLINE)
    with pytest.raises(mg.InvalidInput, match="prompt_lens\\[0\\]"):
        estimate_job(model, plan, ([0, 3], [1, 1]), ROOFLINE)


# The executor, whose steps these are.


@pytest.mark.cpu
def test_the_executor_makes_the_same_waves_and_steps(monkeypatch):
    pytest.importorskip("torch")
    from moegen.exec import generate

    model = mixtral()
    plan = plan_of(model, B=4, prefill=2, omega=0.5)
    prompts, gens = [5, 2, 9, 4, 3, 8], [9, 2, 12, 4, 1, 3]
    layouts, reports = [], []
    build = generate.build
    monkeypatch.setattr(
        generate, "build", lambda *a, **k: layouts.append(build(*a, **k)) or layouts[-1]
    )
    with mg.Engine.random(model, plan, device="cpu", dtype="float32") as engine:
        texts = [list(range(1, n + 1)) for n in prompts]
        engine.generate(texts, gens, on_step=reports.append)
    estimate = estimate_job(model, plan, (prompts, gens), ROOFLINE)
    phases = [report.phase for report in reports]
    assert estimate.prefill_waves == phases.count("prefill")
    assert estimate.decode_steps == phases.count("decode")
    # A layout has its cost of beginning once: as many of them.
    starts = estimate_job(
        model, plan, (prompts, gens), only(copy_expert=1.0, expert=1.0), shared=False
    )
    begun = [graph.phase for graph in layouts].count("decode")
    assert starts.decode_s - 8.0 * estimate.decode_steps == begun
