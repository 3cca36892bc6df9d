"""What people read: where rates come from, bars, and words of patience."""

from __future__ import annotations

import sys
import time

import pytest

import moegen as mg
from moegen.cli import console, words
from moegen.jobs.report import machine
from moegen.sim.bounds import bound


def _measured(*names):
    hw = mg.HardwareSpec.from_name("c2")
    how = {name: f"measured: so and so on 2026-01-0{1 + (name == 'gpu_flops')}" for name in names}
    return mg.HardwareSpec(
        **{f: getattr(hw, f) for f in hw.__dataclass_fields__ if f != "source"},
        source=dict.fromkeys(hw.rates, "assumed: a guess") | how,
    )


def test_rates_say_where_they_come_from():
    assert words.origin_of_rates(_measured()) == "all assumed"
    hw = mg.HardwareSpec.from_name("c2")
    every = hw.rates
    assert {"launch_s", "gpu_efficiency", "cpu_attn_flops", "copy_latency_s"} <= every.keys()
    assert hw.with_(task_s=1e-4).rates.keys() - every.keys() == {"task_s"}
    assert words.origin_of_rates(_measured(*every)) == (
        "all measured on this machine (2026-01-01, 2026-01-02)"
    )
    all_but_one = _measured(*(every.keys() - {"launch_s"}))
    assert words.origin_of_rates(all_but_one).endswith("; assumed: least time of a kernel")
    said = words.origin_of_rates(_measured("h2d_bytes_per_s", "gpu_flops"))
    assert said.startswith("measured: GPU products, link to the GPU; assumed: GPU efficiency, ")
    found = machine(_measured("gpu_flops"))["rates"]
    assert found.keys() == every.keys() and found["gpu_flops"]["source"].endswith("2026-01-02")


def test_measured_rates_are_those_of_the_machine_that_is_named():
    every = _measured(*mg.HardwareSpec.from_name("c2").rates)
    assert " ".join(words.rates(every)).split() == (
        "Rates all measured on c2 (2026-01-01, 2026-01-02)".split()
    )


@pytest.mark.parametrize(
    ("stay", "fetch", "said"),
    [
        (0, "all", "Of the experts, all are copied in each step."),
        (0, "routed", "Of the experts, those are copied that get tokens."),
        (
            44,
            "all",
            "44 of 256 experts stay; of the others, all are copied in each step.",
        ),
        (44, "routed", "44 of 256 experts stay; of the others, those are copied that get tokens."),
        (256, "all", "All 256 experts stay, so none is copied."),
    ],
)
def test_experts_that_stay_are_not_said_to_be_copied(stay, fetch, said):
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    dense = sum(layer.dense_bytes for layer in model.layers) if stay else 0
    s = mg.Strategy(B=8, b_a=8, b_e=64, s_params=dense + stay * model.expert_bytes, fetch=fetch)
    assert words._decode(model, s).endswith(f"(b_e). {said}")


def test_every_part_of_a_bound_has_words():
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=1)
    graph = mg.build(model, mg.Strategy(B=2, b_a=1, b_e=4, omega=0.5), kv_len=8)
    parts = bound(graph, mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))).parts
    assert all(words.part(name) for name in parts)


def test_patience_speaks_only_if_something_takes_its_time(capsys):
    with console.patience("nothing to see", after_s=60):
        pass
    with console.patience("this takes a while", after_s=0.01):
        time.sleep(0.3)
    assert capsys.readouterr().err == "this takes a while\n"


def test_a_bar_that_was_interrupted_says_how_far_it_came(capsys):
    with pytest.raises(KeyboardInterrupt), console.Bar("prefill") as bar:
        bar.update(1, 9, "1/9 rows")
        bar.update(2, 9, "2/9 rows", "decode")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "decode  2/9 rows\n"


def test_a_terminal_gets_a_bar_that_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with console.Bar("prefill") as bar:
        bar.update(643, 757, "15/36 rows, 643/757 tokens, 17.5 tokens/s, 15 s left", "decode")
    said = capsys.readouterr().err
    assert "15/36 rows, 643/757 tokens, 17.5 tokens/s, 15 s left" in said and "━" in said


def test_work_goes_on_when_nobody_reads_its_progress(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        flush = isatty = lambda self: None

    monkeypatch.setattr("sys.stderr", Closed())
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.0)
    with console.Loading() as loading:
        loading(1, 2)
    assert loading.bytes == 1
