"""How long it takes to notice an end, from times made up."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from moegen.errors import InvalidInput  # noqa: E402
from moegen.exec.issue import Times  # noqa: E402
from moegen.exec.waits import latencies  # noqa: E402
from moegen.graph.latencies import MOST_COLD, MOST_S, Latencies  # noqa: E402
from moegen.graph.task import TaskId  # noqa: E402


def ran(op: str, step: int, start_s: float, end_s: float, issue_s: float, expert=-1) -> Times:
    """Turned to at ``issue_s``: what the thread then takes is not what noticing takes."""
    task = TaskId(op, "decode", step, 0, -1, expert)
    return Times(task, start_s, end_s, issue_s, issue_s + 0.0625, issue_s + 0.125)


def step(k: int, at_s: float, late_s: float) -> list[Times]:
    """A layer: what is noticed ``late_s`` later, the first of two experts."""
    return [
        ran("send_qkv", k, at_s, at_s + 1, at_s),
        ran("attn_cpu", k, at_s + 1 + late_s, at_s + 3, at_s + 0.1),
        ran("recv_attn", k, at_s + 3 + late_s, at_s + 4, at_s + 3 + 2 * late_s),
        ran("copy_counts", k, at_s + 4, at_s + 5, at_s + 4),
        ran("expert", k, at_s + 7, at_s + 8, at_s + 5 + 4 * late_s, 0),
        ran("expert", k, at_s + 8, at_s + 9, at_s + 6, 1),
    ]


def test_it_is_the_median_from_an_end_to_who_waits_for_it():
    records = [step(0, 0.0, 0.125), step(1, 10.0, 0.25) + step(2, 20.0, 0.0625)]
    found = latencies(records, on_gpu=False)
    assert found == Latencies(gpu_to_host_s=0.5, cpu_to_host_s=0.25, gpu_to_cpu_s=0.125)


def test_what_was_handed_over_late_was_not_noticed_late():
    send, attn, *_ = step(0, 0.0, 0.5)
    found = latencies([[send, attn._replace(turned_s=1.25, issue_s=1.375)]], on_gpu=False)
    assert found.gpu_to_cpu_s == 0.125  # started at 1.5
    # Who was there before the end noticed at once.
    assert latencies([[send, attn._replace(start_s=0.5)]], on_gpu=False).gpu_to_cpu_s == 0.0


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), 1e308])
def test_a_latency_is_a_moment(seconds):
    """One of years was found only when a simulation stood still."""
    with pytest.raises(
        InvalidInput, match="latencies: gpu_to_cpu_s must be a finite number of at "
    ):
        Latencies(gpu_to_cpu_s=seconds)


@pytest.mark.parametrize("name", ["rested_issue", "rested_turn"])
@pytest.mark.parametrize("times", [-1e-9, float("nan"), 100.1, "cold"])
def test_a_rest_costs_a_few_times_a_task(name, times):
    with pytest.raises(InvalidInput, match=f"latencies: {name} must be a"):
        Latencies(**{name: times})
    # More than any moment lasts, for it is no time.
    assert getattr(Latencies(**{name: MOST_COLD}), name) == 100.0 > MOST_S
    assert getattr(Latencies(**{name: 0}), name) == 0.0


def test_nothing_is_told_by_other_layers_or_none():
    assert latencies([], on_gpu=False) == latencies([[]], on_gpu=False) == Latencies()
    counts, other = step(0, 0.0, 0.5)[3:5]
    elsewhere = other._replace(task=other.task._replace(layer=1))
    assert latencies([[counts, elsewhere]], on_gpu=False) == Latencies()


def launched(op: str, start_s: float, end_s: float) -> Times:
    """Handed over from 1 to 2."""
    return Times(TaskId(op, "decode", 0, 0, -1, -1), start_s, end_s, 0.5, 1.0, 2.0)


def test_a_gpu_that_waits_for_launches_begins_and_ends_a_little_after_them():
    late = [
        launched("post_attn", 1.25, 2.5),
        launched("route", 1.5, 2.25),
        launched("route", 1.75, 2.25),
        launched("route", 1.5, 2.25),
        launched("recv_attn", 1.25, 9.0),  # one kernel: its end tells nothing
    ]
    others = [
        launched("expert", 3.0, 4.0),  # had been launched
        launched("combine", 1.5, 1.5),  # had nothing to do
        launched("copy_expert", 1.0, 30.0),
        launched("attn_cpu", 1.0, 3.0),
    ]
    found = latencies([late, others], on_gpu=True)
    # Of an op's median each: 0.25, 0.5 and 0.25; 0.5 and 0.25.
    assert found == Latencies(issue_to_start_s=0.25, issued_to_end_s=0.375)
    # On CPU lanes threads work while they are handed more.
    assert latencies([late, others], on_gpu=False) == Latencies()


def test_a_gpu_takes_a_moment_from_one_task_to_the_next():
    # Handed over from 1 to 2, and then come those that a run has of each op.
    ran = [
        launched("post_attn", 3.0, 4.0),
        launched("route", 4.25, 5.0),
        launched("expert", 9.0, 10.0),  # waits for a copy, as it may
        launched("combine", 10.5, 11.0),
        launched("lm_head", 12.0, 13.0),
        launched("sample", 13.25, 14.0),
        launched("append_kv", 13.5, 20.0),  # of another lane
    ]
    found = latencies([ran], on_gpu=True)
    assert found == Latencies(gpu_to_gpu_s=0.25)  # an op's median each: 0.25, 0.5 and 0.25
    # What was launched only when the one before had ended waited for that.
    late = [launched("post_attn", 1.5, 1.75), launched("route", 3.0, 4.0)]
    assert latencies([late], on_gpu=True).gpu_to_gpu_s == 0
    assert latencies([ran], on_gpu=False) == Latencies()
