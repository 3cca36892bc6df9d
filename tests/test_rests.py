"""What a rest costs the issuing thread, told from times made up."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("torch")

from moegen.exec.host_code import handed_over  # noqa: E402
from moegen.exec.issue import Times  # noqa: E402
from moegen.exec.rests import MOST_TRIED, costs_of_rests, how_cold  # noqa: E402
from moegen.graph.latencies import BINDS, FELT_S, Latencies, Rest  # noqa: E402
from moegen.graph.ops import OPS  # noqa: E402
from moegen.graph.task import Task, TaskGraph, TaskId, Work  # noqa: E402

pytestmark = pytest.mark.cpu
LN2 = math.log(2)
MS = 1e-3


def task(op, launches=1, layer=0, phase="decode"):
    work = Work(tokens=8, flops=8, gpu_bytes=8, launches=launches)
    return Task(TaskId(op, phase, layer=layer), OPS[op].lane, work=work)


# -- how cold the thread is ------------------------------------------------------------


def handed(*tasks):
    """Each an op, how long the thread rests before it, and how long it is busy with it, in ms."""
    times, now_s = [], 0.0
    for op, rest_ms, busy_ms in tasks:
        turned_s = now_s + rest_ms * MS
        now_s = turned_s + busy_ms * MS
        times.append(Times(TaskId(op, "decode"), 0.0, 1.0, turned_s, now_s, now_s))
    return times


def cold(*tasks):
    return pytest.approx([of.cold for of in how_cold(handed(*tasks))])


def test_a_rest_is_felt_by_the_task_after_it_and_a_third_as_much_by_the_next():
    # Before the first nobody knows of a rest.
    tasks = [("route", 5, 1), ("route", 1, 9), ("combine", 0, 1), ("expert", 0, 1)]
    assert cold(*tasks) == [0.0, LN2, LN2 / 3, LN2 / 9]
    rests = [of.rest_s for of in how_cold(handed(*tasks))]
    assert rests == pytest.approx([0.0, MS, 0.0, 0.0], abs=1e-12)


def test_the_first_tasks_of_a_step_are_never_cold_and_warm_the_thread():
    assert BINDS == {"copy_rows", "embed"}
    found = cold(("route", 0, 1), ("copy_rows", 7, 1), ("embed", 0, 1), ("route", 0, 1))
    assert found == [0.0, 0.0, 0.0, 3 * LN2 / 9]


def test_a_shorter_rest_of_a_colder_thread_changes_nothing():
    # A third of ln 8 is ln 2, more than ln 1.5; a ninth is less than that.
    for rest_ms, then in ((0.5, [LN2, LN2 / 3]), (3, [2 * LN2, 2 * LN2 / 3])):
        tasks = [("route", 0, 1), ("route", 7, 1), ("route", rest_ms, 1), ("route", 0, 1)]
        assert cold(*tasks) == [0.0, 3 * LN2, *then]
    tasks = [("route", 0, 1), ("route", 7, 1), ("route", 0, 1), ("route", 0.5, 1)]
    assert cold(*tasks) == [0.0, 3 * LN2, LN2, math.log(1.5)]


def test_a_moment_between_two_tasks_is_no_rest():
    assert FELT_S == 3e-4
    tasks = [("route", 0, 1), ("route", 0.29, 1), ("route", 0.31, 1), ("route", 0.29, 1)]
    assert cold(*tasks) == [0.0, 0.0, math.log(1.31), math.log(1.31) / 3]


def test_copies_ahead_of_the_first_step_tell_of_no_rest():
    """The step before had tasks after them: how long the thread rested then nobody knows."""
    copies = [("copy_expert", 0, 1), ("copy_expert", 20, 1)]
    assert cold(*copies, ("copy_rows", 20, 1), ("route", 0, 1)) == [0.0] * 4
    # From then on copies are as any other task.
    step = [("route", 20, 1), ("copy_expert", 7, 1), ("route", 0, 1)]
    assert cold(*copies, *step) == [0.0, 0.0, 0.0, 3 * LN2, LN2]


def test_tasks_are_in_the_order_in_which_the_thread_turned_to_them():
    times = handed(("route", 0, 1), ("combine", 1, 1), ("expert", 0, 1))
    found = list(how_cold(times))
    assert [of.times.task.op for of in found] == ["route", "combine", "expert"]
    assert list(how_cold(times[::-1])) == list(how_cold([times[1], times[0], times[2]])) == found
    assert list(how_cold([])) == []


# -- what that costs -------------------------------------------------------------------

# Of each kind, the seconds that a warm thread takes before a task, and to hand it over.
KINDS = {
    task("route", 1): (1e-5, 1e-4),
    task("combine", 1): (2e-5, 3e-5),
    task("combine", 5, layer=1): (2e-5, 2e-4),
    task("send_qkv", 2): (5e-5, 6e-5),
}


def ran(kinds, issue, turn, *, rests=4, warm=9, rest_ms=2.0):
    """A graph of these kinds, and steps of it: after each rest one task, and so many others that
    are still a little cold, or warm; each as much slower as it is cold."""
    times, now_s, rest, step = [], 0.0, Rest(), 0
    for n in range(rests + 1):
        for of, (turn_s, issue_s) in kinds.items():
            pause_s = rest_ms * (1 + n / 4) * MS if n else 0.0  # each another
            for k in range(1 + warm):
                now_s += 0.0 if k else pause_s
                cold = rest.before(0.0 if k else pause_s, of.id.op)
                begins_s = now_s + turn_s * (1 + turn * cold)
                done_s = begins_s + issue_s * (1 + issue * cold)
                id_ = of.id._replace(step=step)
                times.append(Times(id_, done_s, done_s + 1.0, now_s, begins_s, done_s))
                rest.handed_over()
                now_s, step = done_s, step + 1
    return TaskGraph(tuple(kinds), (), phase=next(iter(kinds)).id.phase), times


def costs(*steps):
    """As one model's."""
    return costs_of_rests([steps])


@pytest.mark.parametrize(("issue", "turn"), [(0.5, 2.0), (1.25, 0.3), (0.0, 1.0), (0.0, 0.0)])
def test_what_rests_cost_is_found_of_tasks_of_all_kinds(issue, turn):
    found = pytest.approx((issue, turn))
    assert costs(ran(KINDS, issue, turn)) == found
    # However long they last, and whichever graphs they are of.
    apart = [ran({of: s}, issue, turn, rest_ms=k) for k, (of, s) in enumerate(KINDS.items())]
    assert costs(*apart) == costs_of_rests([[steps] for steps in apart]) == found


def test_where_nothing_tells_they_cost_nothing():
    tells = ran(KINDS, 0.5, 2.0)
    assert costs(tells) != (0.0, 0.0)
    assert costs_of_rests([]) == costs() == costs((tells[0], [])) == (0.0, 0.0)
    # Fewer than four rests of each kind, or rests of a moment: of 0.125 to 0.2 ms.
    assert costs(ran(KINDS, 0.5, 2.0, rests=3)) == (0.0, 0.0)
    assert costs(ran(KINDS, 0.5, 2.0, rest_ms=0.1)) == (0.0, 0.0)
    # Tasks that did nothing.
    assert costs((tells[0], [t._replace(end_s=t.start_s) for t in tells[1]])) == (0.0, 0.0)


@pytest.mark.parametrize("rests_ms", [(2.0, 2.0), (1.8, 2.2)])
def test_tasks_that_are_all_about_as_cold_tell_nothing(rests_ms):
    """There is no warm one to compare them with: their noise would make up a cost."""
    of, noise = task("route"), random.Random(0)
    times, now_s = [], 0.0
    for n in range(40):
        now_s += rests_ms[n % 2] * MS
        done_s = now_s + 1e-4 * noise.uniform(0.9, 1.1)
        times.append(Times(of.id._replace(step=n), 9.0, 10.0, now_s, now_s, done_s))
        now_s = done_s
    assert costs((TaskGraph((of,), (), phase="decode"), times)) == (0.0, 0.0)


def test_more_than_was_tried_is_not_found():
    assert costs(ran(KINDS, 9.0, 6.0)) == (MOST_TRIED, MOST_TRIED)
    issue, turn = costs(ran(KINDS, 0.31, 2.42))
    assert (issue, turn) == (round(issue, 2), round(turn, 2)) == pytest.approx((0.3, 2.4), abs=0.06)


@pytest.mark.parametrize("op", ["copy_dense", "copy_expert", "copy_rows", "embed"])
def test_copies_of_weights_and_what_binds_a_step_tell_nothing(op):
    of = task(op)
    g, times = ran({of: (1e-5, 1e-4)}, 0.5, 2.0)
    slow = [  # whatever comes after a rest is
        t._replace(issued_s=t.issued_s + 1e-4 * (x.rest_s > 0))
        for t, x in zip(times, how_cold(times), strict=True)
    ]
    assert costs((g, times)) == costs((g, slow)) == (0.0, 0.0)
    # Nor do they say anything else of what others tell.
    assert costs((g, slow), ran(KINDS, 0.5, 2.0)) == pytest.approx((0.5, 2.0))


def test_waves_of_prompts_tell_nothing():
    wave = ran({task("route", phase="prefill"): (1e-5, 1e-4)}, 0.5, 2.0)
    assert wave[0].phase == "prefill" and costs(wave) == (0.0, 0.0)
    assert costs(wave, ran(KINDS, 1.0, 0.5)) == pytest.approx((1.0, 0.5))


def test_tasks_of_other_numbers_of_kernels_are_not_compared():
    """Else the larger one, which comes after each rest, would seem to be slower for it."""
    one, many = task("expert", 1), task("expert", 8, layer=1)
    times, now_s = [], 0.0
    for n in range(6):
        for of, rest_s, issue_s in ((many, 2e-3, 8e-5), *((one, 0.0, 1e-5),) * 9):
            now_s += rest_s
            done_s = now_s + issue_s
            times.append(Times(of.id._replace(step=n), 9.0, 10.0, now_s, now_s, done_s))
            now_s = done_s
    assert costs((TaskGraph((one, many), ()), times)) == (0.0, 0.0)


def test_each_model_counts_once_however_many_steps_it_has():
    few = ran(KINDS, 0.5, 1.0, rests=4)
    many = ran(KINDS, 2.0, 3.0, rests=40)
    # Two of three are in the middle, though the third has ten times as many rests.
    assert costs_of_rests([[few], [few], [many]]) == pytest.approx((0.5, 1.0))
    assert costs(few, few, many) == pytest.approx((2.0, 3.0))
    # One that tells nothing does not count.
    none = ran(KINDS, 0.5, 1.0, rests=0)
    assert costs_of_rests([[none], [none], [many]]) == pytest.approx((2.0, 3.0))


def test_what_rests_cost_is_taken_off_what_handing_over_takes():
    g, times = ran(KINDS, 0.5, 2.0)
    warm = Latencies(rested_issue=0.5, rested_turn=2.0)
    found = {h.task: (h.turn_s, h.issue_s) for h in handed_over(g, times, warm)}
    assert found == {of: pytest.approx(seconds) for of, seconds in KINDS.items()}
    # Each by itself, and neither where nothing is known of rests.
    none = {h.task: (h.turn_s, h.issue_s) for h in handed_over(g, times, Latencies())}
    for of, (turn_s, issue_s) in KINDS.items():
        assert none[of][0] > 1.05 * turn_s and none[of][1] > 1.01 * issue_s
