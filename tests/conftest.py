"""Tiers of tests.

``null``  needs no torch; every test without another marker is in it
``cpu``   needs torch, on the CPU
``gpu``   needs torch and a CUDA device

Pick one with ``pytest -m null``. A module of a higher tier says ``pytestmark = pytest.mark.cpu``
and, so that it can be collected where torch is missing, ``torch = pytest.importorskip("torch")``.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

# Before anything loads torch: threads that the lanes start take their count from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Machine profiles of one thread, and what tests break in them, are nobody's but the tests'.
_OWN = Path(__file__).parents[1] / ".pytest_cache"
os.environ["XDG_CACHE_HOME"] = str(_OWN / "cache-home")
# What is compiled is compiled once, whatever cache a test gives its processes.
os.environ["TORCH_EXTENSIONS_DIR"] = str(_OWN / "extensions")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A shared machine makes deadlines lie; CI must fail on the change, not on the draw.
settings.register_profile("moegen", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("moegen")

TIERS = {
    "null": "needs no torch (the default)",
    "cpu": "needs torch, on the CPU",
    "gpu": "needs torch and a CUDA device",
}


def pytest_configure(config: pytest.Config) -> None:
    for tier, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")


@pytest.hookimpl(tryfirst=True)  # before -m picks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker("null")


def pytest_collection_finish(session: pytest.Session) -> None:
    needs_gpu = [item for item in session.items if item.get_closest_marker("gpu")]
    needs_torch = needs_gpu + [item for item in session.items if item.get_closest_marker("cpu")]
    if not needs_torch:
        return  # a run of the null tier never loads torch
    if find_spec("torch") is None:
        for item in needs_torch:
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))
        return

    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
