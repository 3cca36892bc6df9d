"""The issuing thread, simulated: times worked out by hand, and the executor's own thread run on
a clock that does not move by itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from handmade import edge, random_demands, random_durations, random_graph, task, times
from hypothesis import given, settings
from hypothesis import strategies as st
from issued import Issued, VirtualLanes, fixed

import moegen as mg
from moegen.errors import DeadlockError, InvalidInput
from moegen.graph.ahead import MOST_AHEAD
from moegen.graph.latencies import Latencies, Rest
from moegen.graph.task import Edge, EdgeKind, Lane, TaskGraph
from moegen.sim.cost import Cost, CostModel
from moegen.sim.engine import run_lanes, simulate

seeds = st.integers(0, 2**32 - 1)


def host(src: str, dst: str, distance: int = 0) -> Edge:
    """An edge whose consumer needs the value on the host."""
    e = edge(src, dst, distance=distance)
    return e._replace(reason=e.reason._replace(host=True))


# Worked out by hand.


def test_a_chain_takes_what_handing_over_takes_where_that_is_longer():
    graph = TaskGraph((task("a", "GPU"), task("b", "GPU"), task("c", "GPU")), ())
    work = {"a": 1, "b": 1, "c": 1}
    # The thread turns to them at 0, 2 and 4; none ends before it is through with it.
    slow = times(simulate(graph, fixed(work, 2.0)))
    assert slow == {"a": (0.0, 2.0), "b": (2.0, 4.0), "c": (4.0, 6.0)}
    # Here it is ahead: at 0, 0.25, 0.5, and only the first can show it, which it does not.
    fast = times(simulate(graph, fixed(work, 0.25)))
    assert fast == {"a": (0.0, 1.0), "b": (1.0, 2.0), "c": (2.0, 3.0)}
    # Whatever resources give: a task that waits for the thread draws on nothing any more.
    drawn = fixed(work, 2.0, demands={"a": {"h2d": 5}}, capacities={"h2d": 5})
    assert times(simulate(graph, drawn)) == slow


def test_before_a_task_is_handed_over_the_thread_turns_to_it():
    graph = TaskGraph((task("a", "GPU"), task("b", "ACT"), task("c", "GPU")), (edge("a", "b"),))
    cost = fixed({"a": 1, "b": 1, "c": 1}, 1.0, turn_s=0.5)
    # a is handed over from 0.5 to 1.5, b from 2 to 3, when it is launched, c from 3.5 to 4.5.
    assert times(simulate(graph, cost)) == {"a": (0.5, 1.5), "b": (2.0, 4.0), "c": (3.5, 4.5)}


@pytest.mark.parametrize("lane", ["BULK", "KV", "ACT"])
def test_a_copy_is_launched_when_the_thread_is_through_with_it(lane):
    graph = TaskGraph((task("x", lane), task("y", lane), task("z", lane)), ())
    cost = fixed({"x": 1, "y": 4, "z": 1}, 1.0)
    # Launched at 1, 2 and 3: x is late for that, y hides it, and z finds y ahead of it.
    assert times(simulate(graph, cost)) == {"x": (0.0, 2.0), "y": (2.0, 6.0), "z": (6.0, 7.0)}
    # What was measured from a lane's start on, as a replay has it, includes the wait.
    costs = [cost.estimate(t) for t in graph]
    of = graph, costs, [0, 1, 2], [2.0, 4.0, 1.0], None
    assert run_lanes(*of, cost.latencies) == ([0.0, 2.0, 6.0], [2.0, 6.0, 7.0])


@pytest.mark.parametrize("lane", ["BULK", "KV", "ACT"])
def test_a_launch_takes_a_while_to_the_gpu(lane):
    """Which begins that much after the thread does, and is done that much before it is known."""
    graph = TaskGraph((task("x", lane), task("y", lane), task("z", lane)), ())
    cost = fixed({"x": 1, "y": 4, "z": 1}, 1.0, Latencies(issue_to_start_s=0.25))
    # Launched at 0.75, 1.75 and 2.75: what is handed over early waits for nothing.
    expected = {"x": (0.25, 1.75), "y": (1.75, 5.75), "z": (5.75, 6.75)}
    assert times(simulate(graph, cost)) == expected
    # One that takes less than that has ended before the thread is through, which is told later.
    short = fixed({"x": 0.125, "y": 4, "z": 1}, 1.0, Latencies(0, 0, 0, 0.25, 0.125))
    assert times(simulate(graph, short))["x"] == (0.25, 1.125)


def test_the_last_of_several_kernels_ends_after_the_thread_is_through():
    graph = TaskGraph((task("a", "GPU"), task("b", "GPU"), task("c", "GPU")), ())
    cost = fixed({"a": 1, "b": 1, "c": 9}, 2.0, Latencies(0, 0, 0, 0.5, 0.25))
    assert times(simulate(graph, cost)) == {"a": (0.5, 2.25), "b": (2.5, 4.25), "c": (4.5, 13.5)}
    # What takes the thread nothing is not launched.
    some = fixed({"a": 1, "b": 1, "c": 9}, {"a": 2.0}, Latencies(0, 0, 0, 0.5, 0.25))
    assert times(simulate(graph, some)) == {"a": (0.5, 2.25), "b": (2.25, 3.25), "c": (3.25, 12.25)}
    # On CPU lanes a thread works for a lane itself.
    cpu = TaskGraph((task("a", "CPU"),), ())
    assert times(simulate(cpu, cost)) == {"a": (0.0, 2.0)}


@pytest.mark.parametrize("lane", ["BULK", "GPU"])
def test_the_executors_thread_stays_within_a_drivers_queue(lane):
    """Else it would wait in a launch, with lanes idle that it could hand something to."""
    graph = TaskGraph(tuple(task(f"{lane} {i}", lane) for i in range(200)), ())
    ids = [t.id for t in graph]
    lanes = VirtualLanes(
        graph, lambda t: True, dict.fromkeys(ids, 1.0), dict.fromkeys(ids, 1e-3), Latencies()
    )
    handed_s, run = {}, lanes._kernels.run

    def seen(t, index, step):
        handed_s[t.id] = lanes.now_s
        run(t, index, step)

    lanes._kernels.run = seen
    took = lanes.run(1)
    ends_s = [took[i][1] for i in ids]
    assert ends_s == pytest.approx([i + 1.0 for i in range(200)], abs=1e-2)  # none came late
    most = MOST_AHEAD[lane]
    for i, ahead in enumerate(ids[most:]):
        assert handed_s[ahead] >= ends_s[i]
    assert handed_s[ids[most - 1]] < 0.1


def test_what_the_host_must_know_is_noticed_later():
    graph = TaskGraph(
        (task("route", "GPU"), task("counts", "ACT"), task("expert", "GPU")),
        (edge("route", "counts"), host("counts", "expert")),
    )
    cost = fixed(
        {"route": 2, "counts": 1, "expert": 3}, 1.0, Latencies(gpu_to_host_s=0.5, cpu_to_host_s=9)
    )
    # counts is handed over at 1 and waits on its stream for route, until 2; it ends at 3, which
    # is noticed at 3.5.
    assert times(simulate(graph, cost)) == {
        "route": (0.0, 2.0),
        "counts": (2.0, 3.0),
        "expert": (3.5, 6.5),
    }
    # A stream that waited by itself would not be late.
    streams = TaskGraph(graph.tasks, (edge("route", "counts"), edge("counts", "expert")))
    assert times(simulate(streams, cost))["expert"] == (3.0, 6.0)


def test_what_the_thread_finds_when_it_looks_late_it_does_not_wait_for_again():
    graph = TaskGraph(
        (task("route", "GPU"), task("counts", "ACT"), task("other", "GPU"), task("expert", "GPU")),
        (edge("route", "counts"), host("counts", "expert")),
    )
    cost = fixed(
        {"route": 1, "counts": 1, "other": 1, "expert": 1},
        {"route": 1, "counts": 0.5, "other": 4},
        Latencies(gpu_to_host_s=1),
    )
    # counts is launched at 1.5 and ends at 2.5, which could be noticed at 3.5; but the thread is
    # at other until 5.5.
    assert times(simulate(graph, cost)) == {
        "route": (0.0, 1.0),
        "counts": (1.0, 2.5),
        "other": (1.5, 5.5),
        "expert": (5.5, 6.5),
    }


def test_the_thread_waits_for_the_cpu_and_the_cpu_for_the_gpu():
    graph = TaskGraph(
        (task("send", "ACT"), task("attn", "CPU"), task("recv", "ACT")),
        (edge("send", "attn"), edge("attn", "recv")),
    )
    late = Latencies(gpu_to_host_s=9, cpu_to_host_s=0.75, gpu_to_cpu_s=0.25)
    cost = fixed({"send": 1, "attn": 2, "recv": 1}, 0.5, late)
    # send is launched at 0.5. attn is handed over at 0.5, and woken 0.25 after send's end; recv is
    # handed over 0.75 after attn's, and launched at 5.
    assert times(simulate(graph, cost)) == {
        "send": (0.0, 1.5),
        "attn": (1.75, 3.75),
        "recv": (4.5, 6.0),
    }


def test_a_gpu_goes_from_one_task_to_the_next_in_a_moment():
    """Events lie between them, whichever lanes they are on; copies of weights have them in."""
    graph = TaskGraph(
        (task("a", "GPU"), task("b", "GPU"), task("c", "KV"), task("d", "BULK"), task("e", "BULK")),
        (edge("a", "c"),),
    )
    cost = fixed({"a": 8, "b": 1, "c": 1, "d": 1, "e": 1}, 0.5, Latencies(gpu_to_gpu_s=0.25))
    assert times(simulate(graph, cost)) == {
        "d": (0.0, 1.5),
        "e": (1.5, 2.5),
        "a": (1.0, 9.0),
        "c": (9.25, 10.25),
        "b": (9.25, 10.25),
    }
    # What comes too late for it waits for its launch, and no longer; what does nothing for nothing.
    slow = fixed({"a": 1, "b": 1, "c": 0}, {"a": 0.5, "b": 2.0}, Latencies(gpu_to_gpu_s=0.25))
    some = TaskGraph(graph.tasks[:3], ())
    assert times(simulate(some, slow)) == {"a": (0.0, 1.0), "b": (1.25, 2.5), "c": (0.0, 0.0)}


def test_in_that_moment_others_have_what_the_gpu_had():
    graph = TaskGraph(
        (task("w", "BULK"), task("a", "GPU"), task("x", "KV"), task("b", "GPU"), task("c", "GPU")),
        (edge("a", "x"), edge("x", "c")),
    )
    work = {"w": 8, "a": 2, "x": 1, "b": 1, "c": 1}
    drawn = {op: {"h2d": float(work[op])} for op in "wax"}
    cost = fixed(
        work, {"a": 2**-9}, Latencies(gpu_to_gpu_s=0.25), demands=drawn, capacities={"h2d": 1}
    )
    # w and a have half of the link until 4, and w all of it until x and b begin together; x has
    # half of it until 6.25, so 4.75 of w are left then. c begins a moment after x.
    assert times(simulate(graph, cost)) == {
        "w": (0.0, 11.0),
        "a": (0.0, 4.0),
        "x": (4.25, 6.25),
        "b": (4.25, 5.25),
        "c": (6.5, 7.5),
    }
    # As they were measured, nobody shares anything: all of it is in their seconds.
    costs, seconds = [cost.estimate(t) for t in graph], [float(work[t.id.op]) for t in graph]
    start_s, end_s = run_lanes(graph, costs, range(5), seconds, None, cost.latencies)
    assert start_s == [0.0, 0.0, 2.25, 2.25, 3.5] and end_s == [8.0, 2.0, 3.25, 3.25, 4.5]


def test_urgent_lanes_go_first_and_the_gpu_has_one_task_a_turn():
    lane_of = {"g1": "GPU", "g2": "GPU", "b1": "BULK", "b2": "BULK", "k1": "KV"}
    tasks = [task(op, lane) for op, lane in lane_of.items()]
    edges = (edge("g1", "b2", "BUFFER"), edge("g1", "k1"))
    cost = fixed(dict.fromkeys(lane_of, 0.5), 1.0)
    # b1 at 0; b2 and k1 wait until g1 has been handed over, at 1; then they come before g2. What
    # is not the GPU's is launched a second later.
    assert times(simulate(TaskGraph(tuple(tasks), edges), cost)) == {
        "b1": (0.0, 1.5),
        "g1": (1.0, 2.0),
        "b2": (2.0, 3.5),
        "k1": (3.0, 4.5),
        "g2": (4.0, 5.0),
    }
    # Nothing holds BULK back now, so it has both, at 0 and 1, before the GPU has its first.
    free = times(simulate(TaskGraph(tuple(tasks), ()), cost))
    assert [free[op][0] for op in ("b1", "b2", "k1", "g1", "g2")] == [0.0, 1.5, 2.0, 3.0, 4.0]


def decode_in_small() -> TaskGraph:
    """What a step needs of the one before, and copies that do not need it."""
    return TaskGraph(
        (task("copy", "BULK"), task("rows", "ACT"), task("work", "GPU"), task("tokens", "ACT")),
        (
            edge("rows", "work"),
            edge("copy", "work"),
            edge("work", "tokens"),
            host("tokens", "rows", 1),
        ),
    )


def test_a_step_is_bound_when_its_tokens_are_known_and_copies_are_one_ahead():
    cost = fixed({"copy": 1, "rows": 1, "work": 4, "tokens": 1}, 1.0, Latencies(gpu_to_host_s=0.5))
    graph = decode_in_small()
    run = times(simulate(graph, cost, steps=3))
    # Handed over at 0: copy0, 1: copy1, 2: rows0, 3: work0, 4: tokens0; copies and rows are
    # launched a second later. tokens0 runs 8 to 9, so at 9.5 rows1, 10.5 work1, 11.5 copy2 (step
    # 1 is bound), 12.5 tokens1. work1 ends at 15.5, tokens1 at 16.5: at 17 rows2, 18 work2.
    assert run == {
        "copy0": (0.0, 2.0),
        "copy1": (2.0, 3.0),
        "rows0": (2.0, 4.0),
        "work0": (4.0, 8.0),
        "tokens0": (8.0, 9.0),
        "rows1": (9.5, 11.5),
        "work1": (11.5, 15.5),
        "copy2": (11.5, 13.5),
        "tokens1": (15.5, 16.5),
        "rows2": (17.0, 19.0),
        "work2": (19.0, 23.0),
        "tokens2": (23.0, 24.0),
    }
    # Routed weights need the routing of their step, so they are not ahead.
    routed = replace(graph, edges=(*graph.edges, host("rows", "copy")))
    assert times(simulate(routed, cost, steps=3))["copy1"][0] > run["tokens0"][1]
    # An unrolled graph tells steps apart by ids.
    assert times(simulate(graph.unroll(3), cost)) == run


def test_what_is_empty_is_handed_over_too():
    graph = TaskGraph(
        (task("a", "GPU"), task("none", "ACT"), task("b", "GPU"), task("c", "GPU")),
        (edge("a", "none"), host("none", "c")),
    )
    cost = fixed(
        {"a": 1, "none": 0, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 2}, Latencies(gpu_to_host_s=0.5)
    )
    # The empty one takes nothing of the thread, ends with a, at 2, and is noticed at 2.5.
    assert times(simulate(graph, cost)) == {
        "a": (0.0, 2.0),
        "none": (2.0, 2.0),
        "b": (2.0, 4.0),
        "c": (4.0, 6.0),
    }


# Of a rest of 7 ms, ln 8 cold, handing over takes 1 + 3 times as long and what is before it 1 + 6;
# of the next task 1 + 1 and 1 + 2 times.
RESTED = Latencies(rested_issue=1 / math.log(2), rested_turn=2 / math.log(2))


def after_a_rest(latencies: Latencies, ms: float = 7, op: str = "a") -> dict:
    """Three tasks, handed over when a copy of so many ms has ended: starts and ends in ms."""
    graph = TaskGraph(
        (task("copy", "ACT"), task(op, "GPU"), task("b", "GPU"), task("c", "GPU")),
        (host("copy", op),),
    )
    takes = {"copy": ms * 1e-3, op: 1e-3, "b": 1e-3, "c": 1e-3}
    ran = times(simulate(graph, fixed(takes, 1e-3, latencies, turn_s=5e-4)))
    return {of: pytest.approx((1e3 * start, 1e3 * end)) for of, (start, end) in ran.items()}


def test_a_thread_that_has_rested_is_slower_for_a_few_tasks():
    # The copy is handed over from 0.5 to 1.5, by a warm thread, and ends at 8.5. Then a from
    # 8.5 + 3.5 on for 4; b from 16 + 1.5 on for 2; c, for a ninth, from 19.5 + 5/6 on for 4/3.
    assert after_a_rest(RESTED) == {
        "copy": (0.5, 8.5),
        "a": (12.0, 16.0),
        "b": (17.5, 19.5),
        "c": (19.5 + 5 / 6, 19.5 + 5 / 6 + 4 / 3),
    }
    # Noticing late is resting: 6.5 ms and 0.5.
    late = after_a_rest(replace(RESTED, gpu_to_host_s=5e-4), ms=6.5)
    assert late["a"] == (12.0, 16.0)
    # Each has its own factor.
    assert after_a_rest(replace(RESTED, rested_turn=0.0))["a"] == (9.0, 13.0)
    assert after_a_rest(replace(RESTED, rested_issue=0.0))["a"] == (12.0, 13.0)


def test_a_rest_that_costs_nothing_changes_nothing():
    warm = {"copy": (0.5, 8.5), "a": (9.0, 10.0), "b": (10.5, 11.5), "c": (12.0, 13.0)}
    assert after_a_rest(Latencies()) == warm


@pytest.mark.parametrize("op", ["copy_rows", "embed"])
def test_what_binds_a_step_is_no_slower_and_wakes_the_thread(op):
    # b is as after any other: the second after the rest.
    ran = after_a_rest(RESTED, op=op)
    assert (ran[op], ran["b"]) == ((9.0, 10.0), (11.5, 13.5))


def test_of_several_rests_the_one_counts_that_is_felt_the_most():
    graph = TaskGraph(
        (task("copy", "ACT"), task("a", "ACT"), task("b", "ACT"), task("c", "ACT")),
        (host("copy", "a"), host("a", "b"), host("b", "c")),
    )
    # a comes after a rest of 7 ms: from 8 on for 4. It ends 0.5 ms after that, but ln 1.5 is less
    # than a third of ln 8: b is from 12.5 on for 2. It ends 3 ms after that, and ln 4 is more than
    # a ninth of ln 8: c is from 17.5 on for 3.
    takes = {"copy": 7e-3, "a": 5e-4, "b": 3e-3, "c": 1e-3}
    ran = times(simulate(graph, fixed(takes, 1e-3, RESTED)))
    assert {of: (1e3 * start, 1e3 * end) for of, (start, end) in ran.items()} == {
        "copy": pytest.approx((0.0, 8.0)),
        "a": pytest.approx((8.0, 12.5)),
        "b": pytest.approx((12.5, 17.5)),
        "c": pytest.approx((17.5, 21.5)),
    }


def test_a_thread_that_is_busy_all_the_time_is_never_slower():
    graph = decode_in_small()
    # Whatever it waits for has ended when it comes to that, step after step.
    work = {"copy": 0.125, "rows": 0.125, "work": 0.125, "tokens": 0.0}
    takes = {"copy": 2.0, "rows": 1.0, "work": 1.0}
    ran = times(simulate(graph, fixed(work, takes, RESTED, turn_s=0.5), steps=3))
    assert ran == times(simulate(graph, fixed(work, takes, turn_s=0.5), steps=3))
    chain = TaskGraph(tuple(task(op, "GPU") for op in "abc"), ())
    slow = times(simulate(chain, fixed({"a": 1, "b": 1, "c": 1}, 2.0, RESTED)))
    assert slow == {"a": (0.0, 2.0), "b": (2.0, 4.0), "c": (4.0, 6.0)}


def test_steps_of_different_shapes_take_different_times_of_the_thread():
    graph = mg.build(
        mg.ModelSpec.from_pretrained("olmoe-1b-7b").with_(n_layers=1),
        mg.Strategy(B=8, b_a=4, b_e=64, s_expert=0, omega=0.5),
        kv_len=20,
    )
    cost = Issued(CostModel.roofline(mg.HardwareSpec.from_name("c2")), 1e-3)
    assert graph.shape is not None
    ended = replace(graph.shape, new=(0,) * 4 + (1,) * 4)  # of the CPU's rows
    run = simulate(graph, cost, shapes=[graph.shape, ended, graph.shape])
    # Tasks of the CPU's rows have nothing to do in step 1, and take nothing of the thread.
    lasted = {i: e - s for i, s, e in zip(run.ids, run.start_s, run.end_s, strict=True)}
    for op in ("send_qkv", "attn_cpu", "recv_attn"):
        taken = [s for i, s in lasted.items() if i.op == op]
        assert taken[1] == 0 and taken[0] >= 1e-3 * (op != "attn_cpu")
    assert run.step_end_s[1] - run.step_end_s[0] < run.step_end_s[2] - run.step_end_s[1] - 2.5e-3


def test_a_deadlock_names_the_thread():
    # Of step 1 `rows` says what it is, and `early`, which needs that, is before it in its lane.
    graph = TaskGraph(
        (task("early", "ACT"), task("rows", "ACT"), task("tokens", "GPU")),
        (edge("rows", "tokens"), host("tokens", "rows", 1)),
    )
    times_s = {"early": 1, "rows": 1, "tokens": 1}
    assert simulate(graph, CostModel.fixed(times_s), steps=2).makespan_s == 5
    with pytest.raises(DeadlockError) as error:
        simulate(graph, fixed(times_s, 1.0), steps=2)
    message = str(error.value)
    assert "3 of 6 tasks never end" in message
    assert "ACT: decode:early.s1 waits for the issuing thread; behind it" in message
    assert "holds back decode:early.s1: it waits for what tells its step" in message
    assert "holds back decode:tokens.s1: it waits for decode:rows.s1 to be handed over" in message
    # And one that is there without the thread is there with it.
    tasks = task("a", "GPU"), task("b", "GPU"), task("c", "ACT")
    contradicts = TaskGraph(tasks, (edge("b", "c"), edge("c", "a")))
    with pytest.raises(DeadlockError, match="a.s0: it waits for decode:c.s0 to be handed over"):
        simulate(contradicts, fixed({"a": 1, "b": 1, "c": 1}, 1.0))


def test_a_cost_without_the_thread_is_taken_as_it_is():
    class Own(CostModel):
        def estimate(self, task):
            return SimpleNamespace(seconds=2.0, provenance="mine", demands={})

        def capacities(self, in_use=()):
            return {}

    run = simulate(decode_in_small(), Own(), steps=2)
    assert set(run.provenance) == {"mine"} and run.makespan_s == 12.0
    with pytest.raises(InvalidInput, match="issue_s"):
        Cost(1.0, "given", {}, float("nan"))


# What the executor's own thread does, on a clock that tests move.


def simulated(graph: TaskGraph, seconds, issue_s, turn_s, latencies, steps: int):
    """Starts and ends by simulation; None if it is a deadlock."""
    costs = [Cost(seconds[t.id], "given", {}, issue_s[t.id], turn_s[t.id]) for t in graph]
    kinds = list(range(len(graph))) * steps
    each = [costs[k].seconds for k in kinds]
    try:
        start_s, end_s = run_lanes(graph, costs, kinds, each, None, latencies)
    except DeadlockError:
        return None
    ids = [t.id._replace(step=k) for k in range(steps) for t in graph]
    return dict(zip(ids, zip(start_s, end_s, strict=True), strict=True))


def executed(graph: TaskGraph, needs_step, seconds, issue_s, turn_s, latencies, steps: int):
    try:
        return VirtualLanes(graph, needs_step, seconds, issue_s, latencies, turn_s).run(steps)
    except DeadlockError:
        return None


def with_host_values(rng: np.random.Generator, graph: TaskGraph) -> TaskGraph:
    """Some of its values are needed on the host; one of the step before at most tells steps."""
    edges, tells = [], False
    for src, dst, reason in graph.edges:
        if reason.kind is EdgeKind.LANE and graph[src].lane is not graph[dst].lane:
            reason = reason._replace(kind=EdgeKind.DATA)  # the executor knows no such order
        # No op of the CPU lane has values to read before it is handed over.
        if reason.kind is EdgeKind.DATA and graph[dst].lane is not Lane.CPU and rng.random() < 0.4:
            reason = reason._replace(host=not (reason.distance and tells))
            tells = tells or bool(reason.distance)
        edges.append(Edge(src, dst, reason))
    return replace(graph, edges=tuple(dict.fromkeys(edges)))


class InWhole(Rest):
    """So that times are whole: as cold as it rests long, up to 8, and half as cold after a task,
    rounded down."""

    __slots__ = ()

    def before(self, rest_s: float, op: str) -> float:
        self.cold = max(self.cold, min(rest_s, 8.0))
        return self.cold

    def handed_over(self) -> None:
        self.cold //= 2


@settings(max_examples=300, deadline=None)
@given(seed=seeds, steps=st.integers(1, 4), costs=st.sampled_from([(0, 0), (1, 2), (3, 0)]))
def test_random_graphs_are_handed_over_as_the_executor_does(seed, steps, costs):
    rng = np.random.default_rng(seed)
    graph = with_host_values(rng, random_graph(rng))
    reads = {e.dst for e in graph.edges if e.reason.host}
    tells = any(e.reason.host and e.reason.distance for e in graph.edges)
    seconds = {t.id: float(rng.integers(0, 6)) for t in graph}
    issue_s = {t.id: float(rng.integers(0, 4)) for t in graph}
    issue_s[graph.tasks[0].id] += 1  # at least one takes some
    turn_s = {t.id: float(rng.integers(0, 3)) for t in graph}
    late = rng.integers(0, 4, 5).astype(float).tolist()
    latencies = Latencies(*late[:4], 0.0, late[4], *costs)

    def needs_step(t):
        return tells and not (t.lane is Lane.BULK and t.id not in reads)

    of = seconds, issue_s, turn_s, latencies, steps
    with patch("moegen.sim.issuing.Rest", InWhole), patch("issued.Rest", InWhole):
        assert simulated(graph, *of) == executed(graph, needs_step, *of)


@pytest.mark.parametrize("fetch", ["all", "routed"])
@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("slots", [2, 48])  # the thread is far ahead with so many
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_steps_of_models_are_handed_over_as_the_executor_does(name, slots, omega, fetch):
    model = mg.ModelSpec.from_pretrained(name).with_(n_layers=3)
    slots = min(slots, model.layers[-1].n_experts)
    s = mg.Strategy(
        B=6,
        b_a=2,
        b_e=16,
        s_expert=slots * model.expert_bytes,
        omega=omega,
        fetch=fetch,
        kv_slots=2,
    )
    graph = mg.build(model, s, kv_len=30)
    rng = np.random.default_rng(0)
    empty = {t.id for t in graph if t.work is not None and t.work.empty}
    seconds = {t.id: 0.0 if t.id in empty else float(rng.integers(1, 40)) for t in graph}
    issue_s = {t.id: 0.0 if t.id in empty else float(rng.integers(1, 20)) for t in graph}

    def needs_step(t):
        return t.id.op != "copy_dense" and (t.id.op != "copy_expert" or fetch == "routed")

    turn_s = {i: min(s, 2.0) for i, s in issue_s.items()}
    of = seconds, issue_s, turn_s, Latencies(3.0, 5.0, 4.0, 2.0, gpu_to_gpu_s=1.0), 4
    run = simulated(graph, *of)
    assert run is not None and run == executed(graph, needs_step, *of)


# What holds of all.


@settings(max_examples=100, deadline=None)
@given(seed=seeds, steps=st.integers(1, 3), shared=st.booleans())
def test_a_thread_that_takes_next_to_nothing_changes_nothing(seed, steps, shared):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    cost = CostModel.fixed(
        {i: float(np.float32(s)) for i, s in random_durations(rng, graph).items()},
        demands=random_demands(rng, graph) if shared else None,
        capacities={"h2d": 1.0, "d2h": 1.0, "host_memory": 1.2} if shared else None,
    )
    without, within = simulate(graph, cost, steps), simulate(graph, Issued(cost, 1e-300), steps)
    assert within.start_s == pytest.approx(without.start_s, rel=1e-9, abs=1e-12)
    assert within.end_s == pytest.approx(without.end_s, rel=1e-9, abs=1e-12)


def test_a_model_is_as_without_the_thread_where_that_takes_next_to_nothing():
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=4)
    s = mg.Strategy(B=3640, b_a=200, b_e=8192, s_expert=4 * model.expert_bytes, omega=0.5)
    graph = mg.build(model, s, kv_len=640)
    cost = CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    without, within = simulate(graph, cost, 3), simulate(graph, Issued(cost, 1e-300), 3)
    assert within.end_s == pytest.approx(without.end_s, rel=1e-12)
    slower = simulate(graph, Issued(cost, 1e-3), 3)
    unrolled = simulate(graph.unroll(3), Issued(cost, 1e-3))
    assert slower.period_s > without.period_s
    assert unrolled.end_s.tolist() == slower.end_s.tolist()


@settings(max_examples=100, deadline=None)
@given(seed=seeds, steps=st.integers(1, 3))
def test_nothing_is_earlier_for_having_been_handed_over(seed, steps):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    cost = CostModel.fixed(random_durations(rng, graph))
    issue_s = {t.id: float(rng.random()) for t in graph}
    without = simulate(graph, cost, steps)
    within = simulate(graph, Issued(cost, issue_s, Latencies(0.1, 0.2, 0.3, 0.4, 0.5)), steps)
    tasks = [issue_s[i._replace(step=0)] for i in within.ids]
    assert (within.start_s >= without.start_s - 1e-9).all()
    assert (within.end_s >= without.end_s - 1e-9).all()
    assert within.end_s.max() >= sum(tasks) - 1e-9  # there is one thread
    assert (within.end_s - within.start_s >= 0).all()


@settings(max_examples=100, deadline=None)
@given(seed=seeds, n=st.integers(2, 8))
def test_a_slower_thread_ends_no_chain_earlier(seed, n):
    """Where the order is given; else what is urgent may come in time for being late."""
    rng = np.random.default_rng(seed)
    lanes = [list(Lane)[k] for k in rng.integers(5, size=n)]
    tasks = tuple(task(f"t{k}", lane) for k, lane in enumerate(lanes))
    edges = []
    for k in range(n - 1):
        on_host = rng.random() < 0.3 and lanes[k + 1] is not Lane.CPU
        edges.append((host if on_host else edge)(f"t{k}", f"t{k + 1}"))
    graph, latencies = TaskGraph(tasks, tuple(edges)), Latencies(*rng.random(5).tolist())
    cost = CostModel.fixed({t.id: float(rng.random()) for t in graph})
    some = {t.id: float(rng.random()) for t in graph}
    more = {i: s + float(rng.random()) * (rng.random() < 0.5) for i, s in some.items()}
    before = simulate(graph, Issued(cost, some, latencies))
    after = simulate(graph, Issued(cost, more, latencies))
    assert (after.end_s >= before.end_s - 1e-12).all()


PROGRAM = """
import json, sys
from test_issuing import small_run
sys.stdout.write(json.dumps(small_run().to_dict()))
"""


def small_run() -> mg.Timeline:
    model = mg.ModelSpec.from_pretrained("deepseek-v2-lite").with_(n_layers=3)
    s = mg.Strategy(B=48, b_a=16, b_e=256, s_expert=8 * model.expert_bytes, omega=0.5)
    cost = CostModel.roofline(mg.HardwareSpec.from_name("h200"))
    graph = mg.build(model, s, kv_len=700)
    return simulate(graph, Issued(cost, 7e-5, Latencies(3e-5, 5e-5, 4e-5, 2e-5, 1e-5)), steps=2)


def test_same_inputs_give_the_same_bytes_in_another_process_with_other_hashes():
    here = json.dumps(small_run().to_dict())
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": f"{root}:{root / 'tests'}"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    assert run.stdout == here
