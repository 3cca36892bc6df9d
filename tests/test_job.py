"""estimate_job(): the time of a whole job against simulating every step of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import deepseek, mixtral

import moegen as mg
from moegen.graph.shape import Shape
from moegen.graph.waves import deal, room
from moegen.sim import step_times
from moegen.sim.cost import Cost, CostModel
from moegen.sim.job import JobEstimate, estimate_job

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


def every_step(model, plan, prompts, gens, cost, shared) -> JobEstimate:
    """The same job with each of its steps simulated at its own shape, none left out."""

    def run(graph, shapes) -> float:
        steps, bound = graph.unroll(len(shapes)), [graph.bind(shape) for shape in shapes]
        tasks = [replace(t, work=bound[t.id.step][t.id._replace(step=0)].work) for t in steps.tasks]
        return mg.simulate(steps.with_tasks(tasks, None), cost, shared=shared).makespan_s

    prefill_s = decode_s = 0.0
    waves = steps = 0
    most = room(plan.prefill, mg.Workload.from_lengths(prompts, gens), plan.decode.B)
    for i in range(0, len(prompts), plan.decode.B):
        batch = [[p, 1, g] for p, g in zip(prompts, gens, strict=True)][i : i + plan.decode.B]
        prompt_lens = [row[0] for row in batch]
        dealt = deal(prompt_lens, most)
        lengths = dealt.lengths(prompt_lens).tolist()
        shapes = [Shape((0,) * len(new), tuple(new)) for new in lengths]
        s = plan.prefill.with_(b_a=dealt.part_rows)
        prefill_s += run(mg.build(model, s, "prefill", lengths=lengths[0]), shapes)
        waves += len(shapes)
        while live := [row for row in batch if row[1] < row[2]]:
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
    # All rows together: a single row may save a new layout by going on.
    before = time_s(rows, omega=omega)
    assert time_s([(p, g + more) for p, g in rows], omega=omega) > before
    assert time_s([(p + more, g) for p, g in rows], omega=omega) >= before * (1 - 1e-9)


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
