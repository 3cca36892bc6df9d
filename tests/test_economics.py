"""Tokens per dollar and per joule, by hand and against the paper's table 5."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import moegen as mg
from moegen.economics import tokens_per_joule, tokens_per_usd, usd_per_hour
from moegen.errors import InvalidInput

C2 = mg.HardwareSpec.from_name("c2")
RENTED = mg.HardwareSpec.from_name("h200")
PAPER = Path(mg.__file__).parent / "data" / "paper_results.csv"


def test_owned_and_rented_by_hand():
    hw = C2.with_(price_usd=8766.0, power_w=1000.0)
    # A dollar an hour in one year, and 1 kWh at 20 cents.
    assert usd_per_hour(hw, "own", years=1, usd_per_kwh=0.2) == pytest.approx(1.2)
    assert usd_per_hour(hw, "own", years=1, usd_per_kwh=0.2, busy=0.5) == pytest.approx(2.2)
    assert tokens_per_usd(12.0, hw, "own", years=1, usd_per_kwh=0.2) == pytest.approx(36000)
    assert usd_per_hour(RENTED, "rent") == 3.6
    assert tokens_per_usd(100.0, RENTED, "rent") == pytest.approx(100000)
    assert tokens_per_joule(500.0, hw) == 0.5


def test_table_5():
    with PAPER.open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["source"] == "table5"]
    speed = {r["system"]: float(r["value"]) for r in rows}
    eight = C2.with_(price_usd=22300, power_w=1780)  # the eight A5000 of vLLM
    ours, theirs = speed["moe-gen-h"], speed["vllm"]
    assert tokens_per_joule(ours, C2) == pytest.approx(143 / 380)
    gain = tokens_per_joule(ours, C2) / tokens_per_joule(theirs, eight)
    assert gain == pytest.approx(143 / 140 * 1780 / 380)
    # Without electricity dollars are those of the purchase alone.
    per_usd = [
        tokens_per_usd(v, hw, "own", usd_per_kwh=0) for v, hw in ((ours, C2), (theirs, eight))
    ]
    assert per_usd[0] / per_usd[1] == pytest.approx(143 / 140 * 22300 / 4800)


def test_one_way_of_paying_for_all():
    both = C2.with_(rental_usd_per_hour=2.0)
    assert tokens_per_usd(1.0, both) == tokens_per_usd(1.0, both, "own")
    assert tokens_per_usd(1.0, RENTED) == 1000.0
    # Beside a machine that can only be rented the other is rented too.
    found = tokens_per_usd([1.0, 1.0], [both, RENTED])
    assert found == pytest.approx([1800.0, 1000.0])
    with pytest.raises(InvalidInput, match="c2, h200: neither price_usd and power_w nor rental"):
        tokens_per_usd([1.0, 1.0], [C2, RENTED])


def test_columns_and_arrays():
    frame = pd.DataFrame({"tokens_per_s": [10.0, math.nan, 0.0]}, index=["a", "b", "c"])
    found = tokens_per_joule(frame["tokens_per_s"], C2)
    assert isinstance(found, pd.Series) and list(found.index) == ["a", "b", "c"]
    assert found["a"] == 10 / 380 and math.isnan(found["b"]) and found["c"] == 0
    by_machine = tokens_per_joule(np.array([10.0, 10.0]), [C2, C2.with_(power_w=760)])
    assert by_machine.tolist() == [10 / 380, 10 / 760]
    assert tokens_per_usd([3.0, 6.0], RENTED).tolist() == pytest.approx([3000, 6000])


def test_more_throughput_and_less_cost_never_buy_fewer_tokens():
    speeds = np.linspace(0, 100, 5)
    for basis, key in (("own", "price_usd"), ("own", "power_w"), ("rent", "rental_usd_per_hour")):
        hw = C2.with_(rental_usd_per_hour=1.0)
        dear = hw.with_(**{key: 2 * getattr(hw, key)})
        assert (np.diff(tokens_per_usd(speeds, hw, basis)) > 0).all()
        assert (
            tokens_per_usd(speeds, dear, basis)[1:] < tokens_per_usd(speeds, hw, basis)[1:]
        ).all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tokens_per_joule(1.0, RENTED), r"h200 has no power_w.*hw\.with_\(power_w"),
        (lambda: tokens_per_usd(1.0, RENTED, "own"), "h200 has no price_usd and no power_w"),
        (lambda: tokens_per_usd(1.0, C2, "rent"), "c2 has no rental_usd_per_hour"),
        (lambda: tokens_per_usd(1.0, C2, "lease"), 'basis must be "own" or "rent"'),
        (lambda: tokens_per_usd(1.0, C2, years=0), "years must be a finite number above 0"),
        (lambda: tokens_per_usd(1.0, C2, busy=1.5), "busy must be a share of the time"),
        (lambda: tokens_per_usd(1.0, C2, usd_per_kwh=-1), "usd_per_kwh must be a finite number"),
        (lambda: tokens_per_joule(-1.0, C2), "tokens_per_s must be finite and not negative"),
        (lambda: tokens_per_joule(math.inf, C2), "tokens_per_s must be finite and not negative"),
        (lambda: tokens_per_joule([1.0], [C2, C2]), "2 machines for throughputs of shape"),
    ],
)
def test_refusals(call, said):
    with pytest.raises(InvalidInput, match=said):
        call()
