"""What the steps of a profile tell beside the times of ops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from moegen.exec.told import Told, as_in_steps  # noqa: E402
from moegen.graph.company import Company  # noqa: E402

pytestmark = pytest.mark.cpu

ENTRIES = [
    Company("h2d", "host_memory", 0.95, "by themselves"),
    Company("zero_copy", "host_memory", 0.9, "by themselves"),
    Company("h2d", "zero_copy", 0.97, "by themselves"),
]


def told(lost_s, beside_s):
    return Told(lost_s=lost_s, beside_s=beside_s)


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


def test_what_points_tell_adds_up():
    handed = [SimpleNamespace(task=SimpleNamespace(id=SimpleNamespace(op=op))) for op in "ab"]
    asked = []

    def slowed(rate):
        asked.append(rate)
        return 0.1, 0.5

    ops = SimpleNamespace(records=["steps"], handed_over=lambda: handed, slowed_copies=slowed)
    of = Told()
    of.add(ops, {"a"}, 3.0)
    of.add(ops, {"a", "b"}, 3.0)
    assert of.records == [["steps"], ["steps"]] and asked == [3.0, 3.0]
    assert [h.task.id.op for h in of.handed] == ["a", "a", "b"]
    assert (of.lost_s, of.beside_s) == (pytest.approx(0.2), pytest.approx(1.0))
