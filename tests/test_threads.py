"""What threads of a run ask of the system, for themselves alone."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")


from moegen.exec import lanes, threads  # noqa: E402
from moegen.exec.threads import Worker  # noqa: E402

pytestmark = pytest.mark.cpu


def threads_of_torch() -> int:
    """What a thread begins with that is started now."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_worker_has_its_own_torch_threads():
    before = torch.get_num_threads()
    seen = []
    for n in (1, before + 1):
        worker = Worker("own", lambda: seen.append(torch.get_num_threads()), torch_threads=n)
        worker.start()
        worker.wait()
        assert torch.get_num_threads() == threads_of_torch() == before
    assert seen == [1, before + 1]


def test_an_interrupt_while_a_lane_starts_leaves_nothing_behind(monkeypatch):
    before, alive = torch.get_num_threads(), threading.enumerate()
    use, started = threads.use_torch_threads, Worker.start
    interrupted = []

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return super().wait(timeout)

    def start(self):
        self._begun = Interrupted()
        started(self)

    def slowly(n):
        time.sleep(0.1)
        use(n)

    monkeypatch.setattr(threads, "use_torch_threads", slowly)
    monkeypatch.setattr(Worker, "start", start)
    with pytest.raises(KeyboardInterrupt):
        lanes.CpuStream(
            "cpu", lanes.Clock(torch.device("cpu")), pytest.fail, torch_threads=before + 1
        )
    assert interrupted and threading.enumerate() == alive
    assert torch.get_num_threads() == threads_of_torch() == before
