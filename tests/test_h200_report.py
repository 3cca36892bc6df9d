"""The committed report says what the committed raw results say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "h200"


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("h200_report", FOLDER / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_report_is_that_of_the_results(module):
    assert module.REPORT.read_text(encoding="utf-8") == module.report()


def test_shares_follow_from_the_measured_timelines():
    from moegen.timeline import Timeline

    decode = json.loads((FOLDER / "results" / "decode_bound.json").read_text(encoding="utf-8"))
    points = {(p["strategy"]["omega"], p["strategy"]["b_a"]): p for p in decode["points"]}
    for omega in (0.5, 1.0):
        name = f"timeline_omega{omega:g}.json"
        period = Timeline.load(FOLDER / "results" / name).period_s
        p = points[omega, 64]
        assert p["period_s"] == pytest.approx(period, rel=1e-9)
        assert p["share_of_bound"] == pytest.approx(p["bound_s"] / period, rel=1e-9)
        assert p["bound_s"] == max(p["bound_parts_s"].values())
