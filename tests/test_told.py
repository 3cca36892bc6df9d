"""What the steps of a profile tell beside the times of ops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from moegen.exec.issue import Times  # noqa: E402
from moegen.exec.told import Told, as_in_steps, latencies_of  # noqa: E402
from moegen.graph.company import Company  # noqa: E402
from moegen.graph.latencies import Latencies  # noqa: E402
from moegen.graph.ops import OPS  # noqa: E402
from moegen.graph.task import Task, TaskGraph, TaskId, Work  # noqa: E402

pytestmark = pytest.mark.cpu


def task(op):
    work = Work(tokens=8, flops=8, gpu_bytes=8, launches=1)
    return Task(TaskId(op, "decode", layer=0), OPS[op].lane, work=work)


def ran(of, *, turned_s=0.0, issue_s=1.0, issued_s=1.5):
    """From 2 to 3, of the third step."""
    return Times(of.id._replace(step=2), 2.0, 3.0, turned_s, issue_s, issued_s)


A, B = task("route"), task("combine")
GRAPH = TaskGraph((A, B), ())
RATE = 3.0  # bytes a second of the CPU's attention

ENTRIES = [
    Company("h2d", "host_memory", 0.95, "by themselves"),
    Company("zero_copy", "host_memory", 0.9, "by themselves"),
    Company("h2d", "zero_copy", 0.97, "by themselves"),
]


def told(lost_s, beside_s):
    return Told(RATE, lost_s=lost_s, beside_s=beside_s)


def test_steps_say_what_copies_keep_beside_the_cpus_attention():
    first, *others = as_in_steps(ENTRIES, [told(0.04, 0.3), told(0.01, 0.2)])
    assert first.share == pytest.approx(0.9) and "within steps" in first.source
    assert others == ENTRIES[1:]


def test_where_steps_say_too_little_it_stays_as_it_was_measured():
    assert as_in_steps(ENTRIES, [told(0.01, 0.02)]) == ENTRIES
    assert as_in_steps(ENTRIES, []) == ENTRIES


@pytest.mark.parametrize(("lost_s", "share"), [(-0.1, 1.0), (9.0, 0.01)])
def test_nothing_is_faster_for_company_nor_stands_still(lost_s, share):
    assert as_in_steps(ENTRIES, [told(lost_s, 0.5)])[0].share == share


def link(alone, copied, fetched):
    """What a link moved, each as bytes and seconds."""
    return Told(RATE, link=np.array([alone, copied, fetched]))


def test_steps_say_what_copies_and_fetched_kv_move_together():
    # 50 bytes a second alone; 20 and 27 together, over both parts.
    parts = [
        link((10.0, 0.2), (2.0, 0.1), (1.0, 0.05)),
        link((40.0, 0.8), (18.0, 0.9), (1.7, 0.05)),
    ]
    *others, last = as_in_steps(ENTRIES, parts)
    assert last.share == pytest.approx(0.94) and "within steps" in last.source
    assert others == ENTRIES[:2]
    assert as_in_steps(ENTRIES, parts[:1])[2].share == pytest.approx(0.8)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_where_one_part_of_the_link_is_told_by_too_little_it_stays_as_it_was_measured(short):
    seconds = [0.5, 0.5, 0.5]
    seconds[short] = 0.02
    assert as_in_steps(ENTRIES, [link(*((1.0, s) for s in seconds))]) == ENTRIES


def test_together_they_are_no_faster_than_copies_alone():
    assert as_in_steps(ENTRIES, [link((5.0, 1.0), (4.0, 1.0), (3.0, 1.0))])[2].share == 1.0


def test_what_points_tell_adds_up():
    asked = []

    def slowed(rate):
        asked.append(rate)
        return 0.1, 0.5

    moved = np.array([[8.0, 1.0], [4.0, 2.0], [3.0, 2.0]])
    ops = SimpleNamespace(
        graph=GRAPH, records=[ran(A), ran(B)], slowed_copies=slowed, shared_link=lambda: moved
    )
    of = Told(RATE)
    of.add(ops, {"route"})
    of.add(ops, {"route", "combine"})
    assert of.steps == [(GRAPH, ops.records)] * 2 and asked == [RATE, RATE]
    handed = of.handed_over(Latencies())
    assert [h.task.id.op for h in handed] == ["route", "route", "combine"]
    assert (of.lost_s, of.beside_s) == (pytest.approx(0.2), pytest.approx(1.0))
    assert of.link == pytest.approx(2 * moved)


def test_rests_are_told_of_a_thread_with_a_core_for_itself_alone():
    # One task a millisecond after the last, over and over: the second of a pair follows at once,
    # and takes a third of what a rest adds to the first.
    cold = 0.6931471805599453
    times, now_s = [], 0.0
    for n in range(8):
        for of, x in ((A, cold), (B, cold / 3)):
            turn_s, issue_s = 1e-5 * (1 + 2 * x), 1e-4 * (1 + 0.5 * x)
            begins_s = now_s + turn_s
            times.append(
                Times(of.id._replace(step=n), 9.0, 10.0, now_s, begins_s, begins_s + issue_s)
            )
            now_s = begins_s + issue_s
        now_s += 1e-3
    # What follows at once shows a warm thread, and there must be such of the op that rests show.
    warm = [
        Times(A.id._replace(step=n), 9.0, 10.0, -1.0, -1.0 + 1e-5, -1.0 + 1.1e-4) for n in range(20)
    ]
    of = Told(RATE, steps=[(GRAPH, times), (GRAPH, warm)], tells=[(), ()])
    found = latencies_of([of], on_gpu=True)
    assert (found.rested_issue, found.rested_turn) == (pytest.approx(0.5), pytest.approx(2.0))
    assert latencies_of([of], on_gpu=False) == Latencies()


def test_waits_are_told_by_the_steps_of_all_points():
    send, attend = task("send_qkv"), task("attn_cpu")
    g = TaskGraph((send, attend), ())

    def step(n, noticed_s):
        ends_s = 3.0
        sent = Times(send.id._replace(step=n), 2.0, ends_s, 0.0, 0.0, 0.0)
        begins_s = ends_s + noticed_s
        return [sent, Times(attend.id._replace(step=n), begins_s, 9.0, 0.0, 0.0, 0.0)]

    one = Told(RATE, steps=[(g, step(2, 0.1)), (g, step(2, 0.2))], tells=[(), ()])
    other = Told(RATE, steps=[(g, step(2, 0.6))], tells=[()])
    for on_gpu in (True, False):
        assert latencies_of([one, other], on_gpu=on_gpu).gpu_to_cpu_s == pytest.approx(0.2)
