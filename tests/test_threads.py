"""What threads of a run ask of the system, for themselves alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


from moegen.exec.threads import Worker  # noqa: E402


def test_a_worker_has_its_own_torch_threads():
    before = torch.get_num_threads()
    seen = []
    for n in (1, before + 1):
        worker = Worker("own", lambda: seen.append(torch.get_num_threads()), torch_threads=n)
        worker.start()
        worker.wait()
        assert torch.get_num_threads() == before
    assert seen == [1, before + 1]
