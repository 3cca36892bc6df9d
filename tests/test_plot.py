"""What a Gantt chart tells besides its bars: names, how busy each lane is, other layers."""

from __future__ import annotations

import matplotlib
import pytest

import moegen as mg

matplotlib.use("agg")


@pytest.fixture(scope="module")
def timeline() -> mg.Timeline:
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    s = mg.Strategy(B=3640, b_a=256, b_e=8192, s_expert=8 * model.expert_bytes, omega=1)
    graph = mg.build(model, s, phase="decode", kv_len=640)
    return mg.simulate(graph, mg.CostModel.roofline(mg.HardwareSpec.from_name("c2")))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_a_wide_bar_has_its_name_and_a_row_of_narrow_ones_has_one(timeline):
    found = texts(timeline.plot(layers=(10, 11)))
    assert "attn_cpu L10" in found and "attn_cpu L11" in found
    assert "L10 e0-7" in found and "e0" not in found


def test_among_several_layers_no_name_lacks_its_layer(timeline):
    def bare(*layers):
        return [t for t in texts(timeline.plot(layers=layers)) if t[0] in "em" and t[1:2].isdigit()]

    assert bare(10) and not bare(10, 11)


def test_names_are_left_out_where_they_have_no_room(timeline):
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(0.6, 3))
    assert not [t for t in texts(timeline.plot(ax, layers=(10, 11))) if "busy" not in t]


def test_lanes_say_what_they_do_and_how_busy_they_are(timeline):
    busy = timeline.utilization()["share"]
    found = texts(timeline.plot())
    assert f"attention\n{busy['CPU']:.0%} busy" in found
    assert f"weights to GPU\n{busy['BULK']:.0%} busy" in found


def test_other_layers_are_drawn_faintly_and_count_as_busy(timeline):
    whole = timeline.plot()
    assert "(not selected)" not in [t.get_text() for t in whole.get_legend().get_texts()]
    ax = timeline.plot(layers=11)
    assert ax.get_legend().get_texts()[-1].get_text() == "(not selected)"
    frame = timeline.to_frame()
    shown = frame[frame.layer == 11]
    begin, end = shown.start_s.min(), shown.end_s.max()
    cpu = frame[frame.lane == "CPU"]
    busy = (cpu.end_s.clip(begin, end) - cpu.start_s.clip(begin, end)).sum() / (end - begin)
    own = (cpu[cpu.layer == 11].duration_s).sum() / (end - begin)
    assert f"{busy:.0%}" != f"{own:.0%}"
    assert f"attention\n{busy:.0%} busy" in texts(ax)
    assert {"L10", "L12"} <= set(texts(ax)) and "L12" not in texts(whole)


def test_grey_means_not_selected():
    from moegen.plot import COLOURS

    for op, colour in COLOURS.items():
        levels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert max(levels) - min(levels) > 10, op


def test_a_copy_without_inputs_has_no_wait_in_the_trace(timeline, tmp_path):
    import json

    timeline.to_perfetto(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    waits = {e["cat"] for e in events if e["ph"] == "X" and "wait_us" in e["args"]}
    assert "expert" in waits and "attn_cpu" in waits
    assert not waits & {"copy_expert", "copy_dense"}
