"""Why a prediction was wrong that knows the issuing thread: parts with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from handmade import edge, random_demands, random_durations, random_graph, task
from hypothesis import given, settings
from hypothesis import strategies as st
from issued import Issued, fixed

import moegen as mg
from moegen.comparison.pairs import Pairs
from moegen.comparison.split import PARTS, Split
from moegen.graph.latencies import Latencies
from moegen.graph.task import TaskGraph
from moegen.sim.cost import CostModel
from moegen.timeline import Timeline

NOTICED = Latencies(gpu_to_host_s=0.5)


def decode_in_small() -> TaskGraph:
    """rows, work, tokens, which the host must know before the next step."""
    tasks = task("rows", "ACT"), task("work", "GPU"), task("tokens", "ACT")
    back = edge("tokens", "rows", distance=1)
    back = back._replace(reason=back.reason._replace(host=True))
    return TaskGraph(tasks, (edge("rows", "work"), edge("work", "tokens"), back))


def cost(latencies=NOTICED, issue_s=0.25, work=4.0) -> CostModel:
    return fixed({"rows": 1.0, "work": work, "tokens": 1.0}, issue_s, latencies)


def parts(predicted: CostModel, real: CostModel, graph=None, steps: int = 6) -> list[float]:
    """Parts of the error where ``real`` is how things were."""
    run = mg.simulate(graph or decode_in_small(), real, steps)
    measured = Timeline(run.graph, run.ids, run.start_s, run.end_s, source="measured")
    result = mg.compare(predicted, measured)
    seconds = result.parts["seconds"]
    assert seconds.sum() == pytest.approx(result.error_s, abs=1e-9)
    return [seconds[part] for part in PARTS]


def test_what_the_thread_takes_is_tracked():
    # 6 s of tasks a step, 0.25 until rows is launched and 0.5 until the thread notices the tokens.
    assert mg.simulate(decode_in_small(), cost(), 6).period_s == 6.75
    assert parts(cost(), cost()) == [0.0, 0.0, 0.0]
    # A task that takes longer is still just that: before and after it the thread is as it was.
    assert parts(cost(), cost(work=5.0)) == [-1.0, 0.0, 0.0]
    # Who does not know the thread cannot track it, and takes rows to be long.
    assert parts(cost().of, cost()) == [-0.25, 0.0, -0.5]


def test_what_the_thread_takes_beyond_its_prediction_is_not():
    later = cost(Latencies(gpu_to_host_s=0.75))
    assert parts(cost(), later) == [0.0, 0.0, -0.25]
    assert parts(later, cost()) == [0.0, 0.0, 0.25]


def test_a_task_that_waits_for_the_thread_is_not_long():
    # Handing work over takes 6 s from 0.25 on, which its 4 s are hidden in: it runs from 1.25 to
    # 6.25, when tokens is handed over, which runs from 6.5 to 7.5 and is noticed at 8.
    slow = {"rows": 0.25, "work": 6.0, "tokens": 0.25}
    assert mg.simulate(decode_in_small(), cost(issue_s=slow), 6).period_s == 8.0
    assert parts(cost(issue_s=slow), cost(issue_s=slow)) == [0.0, 0.0, 0.0]
    # Longer than that it is because of its work, to 8.25: the step takes 9.75.
    assert parts(cost(issue_s=slow), cost(issue_s=slow, work=7.0)) == [-1.75, 0.0, 0.0]


def test_an_end_that_came_sooner_after_the_thread_is_no_overhead():
    """The replay has a task's duration as it was, however late the prediction has its end."""
    slow = {"rows": 0.25, "work": 6.0, "tokens": 0.25}
    late = cost(Latencies(gpu_to_host_s=0.5, issued_to_end_s=0.125), slow)
    assert parts(late, cost(issue_s=slow))[2] == 0.0


def test_what_lasted_little_longer_than_its_launch_took_tells_nothing_of_its_work():
    graph, real = TaskGraph((task("copy", "BULK"),), ()), fixed({"copy": 0.5}, 1.0)
    predicted = mg.simulate(graph, real)
    assert predicted.makespan_s == 1.5
    for end_s, alone_s in ((1.625, 0.5), (2.25, 1.25)):
        ids, start_s = predicted.ids, predicted.start_s
        run = Timeline(graph, ids, start_s, np.array([end_s]), source="measured")
        split = Split(Pairs(predicted, run), 1.5, end_s)
        assert split.alone_s == pytest.approx([alone_s])


def test_contention_beside_the_thread_is_contention():
    graph = TaskGraph((task("a", "BULK"), task("b", "KV")), (edge("a", "b", "DATA", 1),))

    def link(capacity: float) -> CostModel:
        demands = {"a": {"h2d": 4.0}, "b": {"h2d": 4.0}}
        return fixed({"a": 4.0, "b": 4.0}, 0.5, demands=demands, capacities={"h2d": capacity})

    wide, narrow = mg.simulate(graph, link(2.0), 6), mg.simulate(graph, link(1.0), 6)
    assert wide.period_s == 4.0 and narrow.period_s == pytest.approx(8.0, rel=0.1)
    found = parts(link(2.0), link(1.0), graph)
    assert found[1:] == pytest.approx([0.0, 0.0], abs=1e-9)  # always in company: by the rule
    found = parts(link(1.0), link(1.0), graph)
    assert found == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 4))
def test_parts_sum_to_the_error_and_what_came_true_has_no_overhead(seed, steps):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)

    def made() -> Issued:
        of = CostModel.fixed(
            random_durations(rng, graph),
            demands=random_demands(rng, graph),
            capacities={"h2d": 1.0, "d2h": 1.0, "host_memory": 1.2},
        )
        issue_s = {t.id: float(rng.random()) for t in graph}
        return Issued(of, issue_s, Latencies(*rng.random(5).tolist()))

    predicted, real = made(), made()
    run = mg.simulate(graph, real, steps)
    noisy = replace_times(run, rng)
    result = mg.compare(predicted, noisy)
    scale = max(1.0, result.measured_period_s)
    assert result.parts["seconds"].sum() == pytest.approx(result.error_s, abs=1e-9 * scale)
    true = mg.compare(real, replace_times(run, None)).parts["seconds"]
    assert true["untracked overhead"] == pytest.approx(0.0, abs=1e-9 * scale)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 3))
def test_of_a_run_that_came_true_every_task_would_have_taken_what_was_predicted(seed, steps):
    """However late its launches came, and its end."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    issue_s = {t.id: float(rng.random() * (rng.random() < 0.8)) for t in graph}
    latencies = Latencies(*rng.random(5).tolist())
    real = Issued(CostModel.fixed(random_durations(rng, graph)), issue_s, latencies)
    run = replace_times(mg.simulate(graph, real, steps), None)
    predicted = mg.simulate(graph, real, steps)
    pairs = Pairs(predicted, run)
    split = Split(pairs, predicted.period_s, run.period_s)
    expected_s = [real.seconds(graph[i._replace(step=0)]) for i in run.ids]
    assert split.alone_s == pytest.approx(np.array(expected_s)[pairs.after], abs=1e-9)


def replace_times(run: Timeline, rng: np.random.Generator | None) -> Timeline:
    """The run as if it had been measured, later and longer at random."""
    start_s, end_s = run.start_s.copy(), run.end_s.copy()
    if rng is not None:
        shift = np.cumsum(rng.random(len(start_s)) * 0.1)
        start_s, end_s = start_s + shift, end_s + shift * 1.01
    return Timeline(run.graph, run.ids, start_s, end_s, source="measured")
