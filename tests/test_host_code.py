"""What handing tasks over takes of the issuing thread, from times made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from moegen.exec.host_code import Handed, HostCode, handed_over  # noqa: E402
from moegen.exec.issue import Times  # noqa: E402
from moegen.graph.latencies import Latencies  # noqa: E402
from moegen.graph.ops import OPS  # noqa: E402
from moegen.graph.task import Task, TaskGraph, TaskId, Work  # noqa: E402

pytestmark = pytest.mark.cpu


def task(op, phase="decode", tokens=8.0, launches=1, layer=0):
    work = Work(tokens=tokens, flops=2 * tokens, launches=launches, h2d_bytes=tokens)
    return Task(TaskId(op, phase, layer=layer), OPS[op].lane, work=work)


def ran(of, issue_s, *, starts_s, lasts_s=1.0):
    """Turned to at 0 and handed over from 1 on; begun ``starts_s`` after that."""
    at_s = 1.0 + starts_s
    return Times(of.id._replace(step=2), at_s, at_s + lasts_s, 0.0, 1.0, 1.0 + issue_s)


def told(of, *times):
    (found,) = handed_over(TaskGraph((of,), ()), times, Latencies())
    return found


@pytest.mark.parametrize("op", ["route", "copy_expert"])
def test_of_a_step_tasks_tell_that_worked_and_their_lane_waited_for(op):
    of = task(op)
    early = [ran(of, s, starts_s=99.0) for s in (1.0, 2.0, 12.0)]
    late = [ran(of, s, starts_s=0.5) for s in (3.0, 4.0, 14.0)]
    idle = [ran(of, 0.0, starts_s=99.0, lasts_s=0.0)] * 9
    # The mean without what was held up; of copies of weights a low quantile, for others waited for
    # room in a queue.
    first, second = (1.5, 3.5) if op == "route" else (1.2, 3.2)
    found = told(of, *early, *idle)
    assert (found.issue_s, found.turn_s, found.late) == (pytest.approx(first), 1.0, False)
    found = told(of, *early, *late)
    assert (found.issue_s, found.times) == (pytest.approx(second), 3)
    assert found.late == (op == "route")
    assert not told(of, *early, late[0]).late  # one is not enough
    assert not list(handed_over(TaskGraph((of,), ()), idle, Latencies()))


@pytest.mark.parametrize("several", [{"expert": 0}, {"microbatch": 0}])
def test_of_several_tasks_of_a_layer_all_tell(several):
    """Their lane waits for the first, which finds the thread cold, and not for the others."""
    of = task("expert")
    of = replace(of, id=of.id._replace(**several))
    times = [ran(of, 2.5, starts_s=0.5)] * 2 + [ran(of, 1.0, starts_s=99.0)] * 4
    found = told(of, *times)
    assert (found.issue_s, found.times, found.late) == (1.5, 6, False)


def test_of_waves_tasks_tell_that_soon_began():
    of = task("route", "prefill")
    ahead = [ran(of, s, starts_s=99.0) for s in (1.0, 2.0, 12.0)]
    soon = [ran(of, s, starts_s=0.015) for s in (0.003, 0.005)]
    found = told(of, *ahead, *soon)
    assert (found.issue_s, found.times, found.late) == (pytest.approx(0.004), 2, False)
    # That their lane waited for some is usual where there are many.
    late = [ran(of, 0.002, starts_s=0.001)] * 2
    assert told(of, *late, *soon).issue_s == pytest.approx(0.003)
    assert told(of, *ahead).issue_s == pytest.approx(1.2)  # surely of those that did not wait


def test_tasks_of_one_kind_are_told_together_and_others_apart():
    same, other = task("expert", layer=1), task("expert", tokens=9.0, layer=2)
    graph = TaskGraph((task("expert"), same, other, Task(TaskId("combine", "decode"), "GPU")), ())
    times = [ran(t, s, starts_s=9.0) for t, s in zip(graph, (1.0, 3.0, 7.0, 5.0), strict=True)]
    found = list(handed_over(graph, times, Latencies()))
    assert [(h.issue_s, h.times) for h in found] == [(2.0, 2), (7.0, 1)]


def of(issue_s, late=False, times=1, **more):
    return Handed(task(more.pop("op", "route"), **more), issue_s, issue_s / 2, times, late)


def test_an_op_takes_what_most_kinds_say_and_as_much_at_any_size():
    host = HostCode("route", [of(s) for s in (1.0, 3.0, 8.0)])
    assert host.issue_s(1, 1) == host.issue_s(1e9, 1) == 3.0 and host.turn_s(5) == 1.5
    nothing = HostCode("route", [])
    assert nothing.issue_s(1, 1) == nothing.turn_s(1) == 0 and nothing.more_s is None


def test_those_that_were_waited_for_count_alone_if_there_are_some():
    early, late = [of(1.0)] * 5, [of(s, late=True) for s in (4.0, 5.0, 9.0)]
    assert HostCode("route", [*early, *late]).issue_s(1, 1) == 5.0
    assert HostCode("route", [*early, *late[:2]]).issue_s(1, 1) == 1.0


def test_a_wave_counts_by_its_micro_batches():
    small, large = [of(9.0, phase="prefill")] * 3, [of(2.0, phase="prefill", times=16)]
    assert HostCode("route", small + large).issue_s(1, 1) == 2.0
    decode = [of(9.0)] * 3 + [of(2.0, times=16)]
    assert HostCode("route", decode).issue_s(1, 1) == 9.0


def test_further_kernels_are_of_all_where_seconds_are():
    some = [of(4.0), of(5.0), of(9.0), of(8.0, launches=4)]
    host = HostCode("route", some)
    assert host.more_s == 1.0 and host.issue_s(1, 1) == 5.0  # of one kernel
    expert = HostCode(
        "expert",
        [
            h._replace(task=task("expert", launches=n))
            for h, n in zip(some, (1, 1, 1, 4), strict=True)
        ],
    )
    assert (expert.issue_s(1, 1), expert.issue_s(1, 3)) == (5.0, 7.0)


def test_what_binds_a_step_takes_no_less_of_more_rows():
    some = [of(s, op="copy_rows", tokens=n) for n, s in ((1, 5.0), (2, 3.0), (8, 9.0))]
    host = HostCode("copy_rows", some)
    assert [host.issue_s(n, 1) for n in (0.5, 1, 2, 5, 8, 99)] == [4.0, 4.0, 4.0, 6.5, 9.0, 9.0]
    assert host.turn_s(8) == 4.5


def test_of_copies_of_weights_the_quickest_tells():
    some = [of(s, op="copy_expert", launches=n) for s, n in ((6.0, 1), (4.0, 1), (6.0, 2))]
    assert HostCode("copy_expert", some).issue_s(1, 1) == 4.0
    assert HostCode("copy_expert", some[2:]).issue_s(1, 1) == 3.0
