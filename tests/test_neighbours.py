"""Who else uses the cores while something is measured."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import namedtuple

import pytest

pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from moegen.exec import neighbours  # noqa: E402
from moegen.exec.neighbours import Neighbours  # noqa: E402

Core = namedtuple("Core", ["user", "system", "idle", "iowait", "steal", "guest"])
Own = namedtuple("Own", ["user", "system", "children_user", "children_system"])


@pytest.fixture
def machine(monkeypatch):
    """Four cores, of which this process may run on the first and the last; ten seconds pass."""
    state = {"now": 100.0, "own": Own(0, 0, 0, 0), "cores": [Core(0, 0, 0, 0, 0, 0)] * 4}

    class Process:
        def cpu_affinity(self):
            return [0, 3]

        def cpu_times(self):
            return state["own"]

    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: state["cores"])
    monkeypatch.setattr(neighbours.time, "perf_counter", lambda: state["now"])

    def passes(seconds, own, cores):
        state.update(now=state["now"] + seconds, own=Own(*own), cores=[Core(*c) for c in cores])

    return passes


IDLE = (0, 0, 10, 0, 0, 0)


def test_what_this_process_and_its_children_use_is_not_others(machine):
    seen = Neighbours()
    machine(10, (5, 1, 2, 1), [(6, 2, 1, 1, 0, 0), IDLE, IDLE, (1, 0, 9, 0, 0, 0)])
    assert seen.cores() == 0 and seen.note() is None


def test_others_are_other_processes_and_whoever_the_host_lends_the_cores_to(machine):
    seen = Neighbours()
    # A guest's second is in the user's too. Other cores do not count.
    busy = (10, 0, 0, 0, 0, 0)
    machine(10, (4, 0, 0, 0), [(6, 1, 0, 0, 3, 2), busy, busy, (1, 0, 5, 4, 0, 0)])
    assert seen.cores() == pytest.approx(0.7)
    assert seen.note().startswith("others used 0.7 of 2 cores meanwhile: ")


def test_a_moment_tells_nothing(machine):
    seen = Neighbours()
    machine(0.5, (0, 0, 0, 0), [(0.5, 0, 0, 0, 0, 0)] * 4)
    assert seen.cores() == 0 and seen.note() is None


def test_here_a_process_that_does_nothing_else_is_seen():
    seen = Neighbours()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(2)
        used = seen.cores()
        other.kill()
    assert 0.2 < used < 1.2 * len(seen._cores)
