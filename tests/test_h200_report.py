"""The committed report says what the committed raw results say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "h200"


@pytest.fixture(scope="module")
def module():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("report")
    sys.path.remove(str(FOLDER))


def test_report_is_that_of_the_results(module):
    assert module.REPORT.read_text(encoding="utf-8") == module.report()


def test_shares_follow_from_the_measured_timelines():
    from moegen.timeline import Timeline

    results = FOLDER / "results"
    points = [
        p
        for path in sorted(results.glob("decode_bound*.json"))
        for p in json.loads(path.read_text(encoding="utf-8"))["points"]
    ]
    timelines = sorted(results.glob("timeline_*.json"))
    assert points and timelines
    for path in timelines:
        tl = Timeline.load(path)
        s = tl.graph.strategy
        assert s is not None
        [p] = [p for p in points if p["period_s"] == pytest.approx(tl.period_s, rel=1e-9)]
        assert p["strategy"] == s.to_dict()
    for p in points:
        assert p["share_of_bound"] == pytest.approx(p["bound_s"] / p["period_s"], rel=1e-9)
        assert p["bound_s"] == max(p["bound_parts_s"].values())
