"""sweep(): which points it plans, what it refuses, and what the frame says of them."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import joblib
import numpy as np
import pandas as pd
import pytest
from fake_plan import Calls

import moegen as mg
from moegen.sim import sweep as module
from moegen.sim.sweep import RESULTS

MODEL = mg.ModelSpec.from_pretrained("mixtral-8x7b")
HW = mg.HardwareSpec.from_name("c2")
WORK = mg.Workload.uniform(n=1000, prompt_len=512, gen_len=256)


@pytest.fixture
def calls(monkeypatch):
    found = Calls([])
    monkeypatch.setattr(module, "plan", found.plan)
    return found.calls


def quiet(*args, **kwargs) -> pd.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mg.sweep(*args, **kwargs)


def test_points_are_the_product_in_the_order_of_the_arguments(calls):
    df = mg.sweep(MODEL, HW, WORK, omega=[0, 0.5], B=(100, 200, 400), b_a=8)
    assert list(df.columns[:3]) == ["omega", "B", "b_a"]
    fixed = [c[-1] for c in calls]
    assert fixed == [{"omega": o, "B": b, "b_a": 8} for o in (0, 0.5) for b in (100, 200, 400)]
    assert df["omega"].tolist() == [0, 0, 0, 0.5, 0.5, 0.5]
    assert df["B"].tolist() == 2 * [100, 200, 400] and df["B"].dtype.kind == "i"
    assert all(c[:4] == (MODEL, HW, WORK, None) for c in calls)


def test_a_row_has_what_was_predicted_and_chosen(calls):
    (row,) = mg.sweep(MODEL, HW, WORK, omega=0.8).to_dict("records")
    rate = 100 * (1 - 0.04)
    assert row["decode_tokens_per_s"] == row["throughput"] == pytest.approx(rate)
    assert row["time_s"] == pytest.approx(256_000 / rate) and row["load_s"] == 0.5
    assert (row["binds"], row["bound_share"]) == ("chain", 0.9)
    assert (row["prefill_binds"], row["prefill_bound_share"]) == ("lane GPU", 0.8)
    assert (row["B"], row["b_a"], row["fetch"], row["prefill_B"]) == (100, 10, "all", 64)
    assert (row["price_usd"], row["power_w"], row["error"]) == (4800, 380, "")
    assert row["notes"] == "made up; by a formula"


def test_what_tokens_cost_is_that_of_the_whole_job(calls):
    df = mg.sweep(MODEL, HW, WORK, omega=[0.1, 0.6], B=[100, 9000])
    for name in ("tokens_per_usd", "tokens_per_joule"):
        expected = getattr(mg, name)(df["throughput"], HW)
        pd.testing.assert_series_equal(df[name], expected, check_names=False)
        assert df[name].notna().tolist() == [True, False, True, False]
    unknown = HW.with_(price_usd=None)
    (row,) = mg.sweep(MODEL, unknown, WORK, omega=0.6).to_dict("records")
    assert math.isnan(row["tokens_per_usd"]) and row["tokens_per_joule"] > 0
    rented = unknown.with_(rental_usd_per_hour=2.0)
    df = mg.sweep(MODEL, rented, WORK, omega=0.6)
    assert df["tokens_per_usd"][0] == pytest.approx(3600 * df["throughput"][0] / 2)
    assert "rented" in df.attrs["notes"][0]
    both = quiet(MODEL, None, WORK, hw=[HW, rented])
    assert both["tokens_per_usd"].isna().tolist() == [False, True]  # not two prices in a column


def test_machines_and_workloads_change_in_what_is_swept_alone(calls):
    quiet(MODEL, HW, WORK, h2d_bytes_per_s=np.array([25e9, 50e9]), prompt_len=[64], n=[7])
    assert [c[1] for c in calls] == [HW.with_(h2d_bytes_per_s=rate) for rate in (25e9, 50e9)]
    assert {c[2].groups for c in calls} == {((64, 256, 7),)}
    assert all(c[-1] == {} for c in calls)


def test_lengths_of_a_histogram_are_set_for_every_row(calls):
    mixed = mg.Workload(((10, 5, 3), (20, 5, 2), (20, 9, 1)))
    quiet(MODEL, HW, mixed, gen_len=[4])
    quiet(MODEL, HW, mixed, prompt_len=[8], gen_len=[4], n=[60])
    assert [c[2].groups for c in calls] == [((10, 4, 3), (20, 4, 3)), ((8, 4, 60),)]
    with pytest.raises(mg.InvalidInput, match="n cannot be swept: rows of workload have 3 diff"):
        mg.sweep(MODEL, HW, mixed, n=[5])


def test_whole_objects_are_swept_by_object_or_by_name(calls):
    other = HW.with_(host_memory_bytes=1e12)
    df = quiet(None, HW, WORK, model=["mixtral-8x7b", "deepseek-v2"], hw=[HW, other, "c1"])
    assert df["model"].tolist() == 3 * ["mixtral-8x7b"] + 3 * ["deepseek-v2"]
    assert df["hw"].tolist() == 2 * ["c2", "c2 #2", "c1"]
    assert [c[1].host_memory_bytes for c in calls[:3]] == [512e9, 1e12, 256e9]
    df = quiet(MODEL, HW, work=["gsm8k", WORK], schedule="module")
    assert df["work"].tolist() == ["gsm8k", "1000 x (512 + 256)"]
    assert set(df["schedule"]) == {"module"}


def test_what_does_not_fit_stays_as_a_row_that_says_why(calls):
    df = mg.sweep(MODEL, HW, WORK, B=[100, 9000], omega=[0.1, 0.2])
    assert df["error"].tolist() == ["", "", *2 * ["does not fit host memory: 7 GiB too much"]]
    numbers = [*RESULTS, "bound_share", "b_a", "prefill_B"]
    assert df.loc[2:, numbers].isna().all(axis=None) and df.loc[:1, numbers].notna().all(axis=None)
    assert df["binds"].isna().tolist() == [False, False, True, True]
    assert df["price_usd"].tolist() == 4 * [4800]
    assert df.attrs["notes"] == ["2 of 4 points do not fit: the column error says why"]


def test_a_knob_that_changes_nothing_is_reported(calls):
    with pytest.warns(UserWarning, match="^b_e has no effect: every result is the same for all 3"):
        df = mg.sweep(MODEL, HW, WORK, b_e=[256, 1024, 8192], omega=[0, 0.6, 1])
    assert [n.split()[0] for n in df.attrs["notes"]] == ["b_e"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mg.sweep(MODEL, HW, WORK, B=[100, 200], b_e=[256])  # one value says nothing
        mg.sweep(MODEL, HW, WORK, B=[6000, 7000])  # nor do points that do not fit


def test_what_changes_costs_alone_has_an_effect():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = mg.sweep(MODEL, HW, WORK, price_usd=[2400, 4800], progress=False)
    assert frame["throughput"].nunique() == 1 and frame["tokens_per_usd"].nunique() == 2


def test_a_link_that_is_faster_for_weights_alone_is_pointed_out(calls):
    df = mg.sweep(MODEL, HW, WORK, h2d_bytes_per_s=[25e9, 50e9])
    (note,) = df.attrs["notes"]
    assert "zero_copy_bytes_per_s" in note and "22.5 GB/s" in note
    link = {"h2d_bytes_per_s": [25e9, 50e9], "zero_copy_bytes_per_s": 45e9}
    assert not any("zero" in n for n in quiet(MODEL, HW, WORK, **link).attrs["notes"])


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({}, "nothing is swept"),
        ({"omegas": [0]}, "no parameter 'omegas' to sweep; there are, of strategy: B, b_a"),
        ({"gpu_efficiency": [0.5]}, "no parameter 'gpu_efficiency'"),
        ({"omega": []}, "omega has no values"),
        ({"omega": [0, math.nan]}, "omega must be a finite number, got nan"),
        ({"omega": [-0.1]}, r"omega .* lies in \[0, 1\], got -0.1"),
        ({"B": [0]}, "B must be a whole number of at least 1, got 0"),
        ({"B": np.array([1.5])}, "B must be a whole number of at least 1, got 1.5"),
        ({"h2d_bytes_per_s": [0]}, "h2d_bytes_per_s must be finite and positive, got 0"),
        ({"h2d_bytes_per_s": [-1e9]}, "h2d_bytes_per_s must be finite and positive, got -1"),
        ({"host_memory_bytes": [math.inf]}, "host_memory_bytes must be finite and positive"),
        ({"prompt_len": [0]}, "prompt_len must be a whole number of at least 1, got 0"),
        ({"n": [math.nan]}, "n must be a whole number"),
        ({"schedule": ["module", "flexgen"]}, "schedule 'flexgen' is not there; known: module"),
        ({"model": [3]}, "model takes ModelSpecs, or their names, got 3"),
        ({"hw": ["c9"]}, "'c9' is no machine"),
        ({"omega": {"a": 1}}, "omega must be a finite number"),
    ],
)
def test_bad_questions_are_refused_before_anything_is_planned(calls, axes, said):
    with pytest.raises(mg.InvalidInput, match=said):
        mg.sweep(MODEL, HW, WORK, **axes)
    assert not calls


def test_what_is_neither_given_nor_swept_is_missed(calls):
    with pytest.raises(mg.InvalidInput, match="work must be a Workload, got None; or sweep it"):
        mg.sweep(MODEL, HW, omega=[0])
    with pytest.raises(mg.InvalidInput, match="hw must be a HardwareSpec, got 'c2'"):
        mg.sweep(MODEL, "c2", WORK, omega=[0])


def test_a_point_that_a_plan_refuses_is_named(monkeypatch):
    def refuse(*_, **__):
        raise mg.InvalidInput("b_a is above B")

    monkeypatch.setattr(module, "plan", refuse)
    with pytest.raises(mg.InvalidInput, match=r"b_a is above B \(at b_a 9, hw c1\)"):
        mg.sweep(MODEL, None, WORK, b_a=[9], hw="c1")


def test_a_cost_model_goes_with_its_machine(calls):
    roofline, fast = mg.CostModel.roofline(HW), [25e9, 50e9]
    given = mg.CostModel.fixed({"x": 1.0})
    # The roofline of the machine is that of each machine; another cost stays what it is.
    quiet(MODEL, HW, WORK, roofline, h2d_bytes_per_s=fast)
    quiet(MODEL, HW, WORK, given, host_memory_bytes=[1e12, 2e12])
    quiet(MODEL, HW, WORK, cost=mg.CostModel.roofline, h2d_bytes_per_s=fast)
    costs = [c[3] for c in calls]
    assert costs[:4] == [None, None, given, given]
    assert [c.hw.h2d_bytes_per_s for c in costs[4:]] == fast
    for axes in ({"h2d_bytes_per_s": fast}, {"hw": ["c1"]}):
        with pytest.raises(mg.InvalidInput, match="cost of one machine, and .* is swept"):
            mg.sweep(MODEL, HW, WORK, given, **axes)
    with pytest.raises(mg.InvalidInput, match="cost must be a CostModel, or a function"):
        mg.sweep(MODEL, HW, WORK, 3, omega=[0])


def test_who_watches_is_told_of_every_point(calls):
    told = []
    df = mg.sweep(MODEL, HW, WORK, omega=[0, 0.5, 1], progress=lambda *of: told.append(of))
    assert told == [(1, 3), (2, 3), (3, 3)] and len(df) == 3


def test_a_bar_is_drawn_on_stderr_and_only_for_somebody(calls, capsys):
    mg.sweep(MODEL, HW, WORK, omega=[0, 1])
    assert capsys.readouterr() == ("", "")
    mg.sweep(MODEL, HW, WORK, omega=[0, 1], progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "sweep" in err and "100%" in err


def test_an_ambient_backend_takes_the_points(calls):
    with joblib.parallel_config(backend="threading", n_jobs=2):
        df = mg.sweep(MODEL, HW, WORK, omega=[0, 0.3, 0.6])
    assert df["omega"].tolist() == [0, 0.3, 0.6] and len(calls) == 3


def test_processes_give_the_same_frame():
    small = MODEL.with_(n_layers=2)
    work = replace(WORK, groups=((64, 8, 40),))
    one, two = (
        quiet(small, HW, work, omega=[0, 0.5], B=[10, 10**6], n_jobs=n, progress=False)
        for n in (1, 2)
    )
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert one.attrs == two.attrs
    fits = one[one["error"] == ""]
    assert len(fits) and (fits["decode_tokens_per_s"] > 0).all()
