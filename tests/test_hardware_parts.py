"""Machines from parts: what is derived, what is refused, and that sources come along."""

from __future__ import annotations

import dataclasses

import pytest

import moegen as mg
from moegen.errors import InvalidInput
from moegen.graph.hardware import HardwareSpec, catalogue, field_names
from moegen.graph.hardware_parts import by_driver_name, part, parts

compose = HardwareSpec.compose

# Dense bf16 TFLOP/s with float32 sums and GB/s, as the makers' sheets have them.
SHEETS = {
    "rtx-3090": (71, 936),
    "rtx-4090": (165.2, 1008),
    "rtx-5090": (209.5, 1792),
    "rtx-a5000": (222.2 / 2, 768),
    "rtx-a6000": (309.7 / 2, 768),
    "rtx-6000-ada": (728.5 / 2, 960),
    "rtx-pro-6000": (1007.6 / 2, 1792),
    "l4": (242 / 2, 300),
    "l40s": (733 / 2, 864),
    "a10": (125, 600),
    "a100-40gb": (312, 1555),
    "a100-80gb": (312, 2039),
    "h100-pcie": (1513 / 2, 2000),
    "h100-sxm": (1979 / 2, 3350),
    "h200-sxm": (1979 / 2, 4800),
    "b200": (4500 / 2, 7700),
}


@pytest.mark.parametrize("name", SHEETS)
def test_peaks_are_those_of_the_data_sheets_without_sparsity(name):
    tflops, gb_per_s = SHEETS[name]
    gpu = part("gpu", name).values
    assert gpu["gpu_flops"] / 1e12 == pytest.approx(tflops, rel=0.02)
    assert gpu["gpu_bytes_per_s"] / 1e9 == pytest.approx(gb_per_s, rel=0.01)


@pytest.mark.parametrize("gpu", parts("gpu"))
def test_every_gpu_goes_with_a_cpu_and_every_value_has_a_source(gpu):
    hw = compose(gpu, "grace" if gpu == "gh200" else "epyc-9654", "480GB")
    given = {key for key in field_names() if getattr(hw, key) is not None}
    assert given <= hw.source.keys() and "no source" not in hw.source.values()
    assert hw.kind("gpu_flops") == "data sheet" and hw.kind("h2d_bytes_per_s") == "assumed"
    assert by_driver_name(f"NVIDIA {part('gpu', gpu).values['nvml']}") == part("gpu", gpu)
    assert hw.link_peak_bytes_per_s is not None
    assert 0.7 < hw.h2d_bytes_per_s / hw.link_peak_bytes_per_s < 0.9


@pytest.mark.parametrize("cpu", [c for c in parts("cpu") if c != "grace"])
def test_every_cpu_goes_with_a_gpu(cpu):
    hw = compose("l4", cpu, "64GB")
    cores, values = int(hw.cpu_name.split(", ")[1].split()[0]), part("cpu", cpu).values
    channel = part("memory", values["memory"]).values["channel_bytes_per_s"]
    assert hw.host_bytes_per_s == pytest.approx(0.7 * values["channels"] * channel)
    limits = (0.8 * hw.host_bytes_per_s, 6e9 * cores)
    assert hw.cpu_attn_bytes_per_s == pytest.approx(min(limits))
    how = hw.source["cpu_attn_bytes_per_s"]
    assert ("a core" in how) == (limits[1] < limits[0]) and how.startswith("assumed")


def test_a_machine_worked_out_by_hand():
    hw = compose("rtx-4090", "epyc-9354", "384GB ddr5-4800 x8")
    assert (hw.gpu_memory_bytes, hw.host_memory_bytes) == (24e9, 384e9)
    assert hw.host_bytes_per_s == pytest.approx(0.7 * 8 * 4800e6 * 8)
    assert hw.cpu_attn_flops == pytest.approx(0.5 * 32 * 3.25e9 * 32)
    assert hw.cpu_attn_bytes_per_s == pytest.approx(0.8 * 0.7 * 307.2e9)
    assert (hw.h2d_bytes_per_s, hw.duplex_bytes_per_s, hw.zero_copy_bytes_per_s) == (
        25e9, 20e9, 22.5e9,
    )  # fmt: skip
    assert hw.price_usd == 1599 + 3420 + 384 * 5 and hw.power_w == pytest.approx(789.9, abs=0.1)
    assert "70% of the 307.2 GB/s of 8 channels of ddr5-4800" in hw.source["host_bytes_per_s"]


def test_parts_of_the_papers_testbed_give_its_values_where_nothing_was_worked_back():
    c2, mine = HardwareSpec.from_name("c2"), compose("rtx-a5000", "epyc-7453", "512GB")
    worked_back = {"name", "host_bytes_per_s", "cpu_attn_bytes_per_s", "link_peak_bytes_per_s"}
    costs = {"power_w", "rental_usd_per_hour", "price_usd"}
    for key in set(field_names()) - worked_back - costs:
        assert getattr(mine, key) == getattr(c2, key), key
    assert mine.host_bytes_per_s == pytest.approx(c2.host_bytes_per_s, rel=0.03)
    assert mine.price_usd == pytest.approx(c2.price_usd, rel=0.001)


def test_the_curve_of_an_h200_is_the_measured_one():
    hw = compose("h200-sxm", "xeon-8480", "1TB")
    assert hw.gpu_efficiency == HardwareSpec.from_name("h200").gpu_efficiency
    slower = hw.with_(gpu_efficiency=compose("l4", "xeon-8480", "1TB").gpu_efficiency)
    assert slower.efficiency(512) < hw.efficiency(512)  # 403 FLOP a byte, not 206
    faster = compose("rtx-3090", "xeon-8480", "1TB")
    assert faster.efficiency(64) > hw.efficiency(64)


def test_what_follows_from_a_given_field_follows():
    hw = compose("rtx-4090", "epyc-9354", "384GB", h2d_bytes_per_s=20e9, host_bytes_per_s=100e9)
    assert (hw.d2h_bytes_per_s, hw.duplex_bytes_per_s) == (20e9, 16e9)
    assert hw.cpu_attn_bytes_per_s == pytest.approx(80e9)
    assert hw.kind("h2d_bytes_per_s") == "set by the caller"
    assert hw.kind("d2h_bytes_per_s") == "assumed"


def test_the_link_is_the_slower_ends():
    assert compose("rtx-4090", "epyc-9354", "1TB").h2d_bytes_per_s == 25e9
    assert compose("h100-sxm", "epyc-7763", "1TB").h2d_bytes_per_s == 25e9
    assert compose("h100-sxm", "epyc-9354", "1TB").h2d_bytes_per_s == 55e9
    assert compose("h100-sxm", "epyc-9354", "1TB", "pcie4-x8").h2d_bytes_per_s == 12.5e9


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (("rtx-4091", "epyc-9354", "1TB"), "'rtx-4091' is no GPU.*did you mean rtx-4090"),
        (("rtx-4090", "epyc", "1TB"), "'epyc' is no CPU of the catalogue.*epyc-9354"),
        (("V100", "epyc-9354", "1TB"), "'V100' cannot be used: it has no bf16"),
        (("mi300x", "epyc-9354", "1TB"), "'mi300x' cannot be used: it needs ROCm"),
        (("rtx-4090", "epyc-9354", "1TB", "pcie5-x16"), "pcie5-x16: rtx-4090 has pcie4-x16"),
        (("h100-sxm", "epyc-7763", "1TB", "pcie5-x8"), "pcie5-x8: epyc-7763 has pcie4-x16"),
        (("rtx-4090", "epyc-9354", "1TB", "nvlink-c2c"), "nvlink-c2c: rtx-4090 has pcie4-x16"),
        (("rtx-4090", "epyc-9354", "1TB", "pcie9"), "'pcie9' is no link"),
        (("gh200", "epyc-9354", "480GB"), "gh200 goes with a CPU that has nvlink-c2c"),
        (("rtx-4090", "ryzen-9-7950x", "384GB"), "at most 192 GB, 192 GB less"),
        (("rtx-4090", "epyc-9354", "1TB ddr4-3200"), "takes ddr5, not ddr4-3200"),
        (("rtx-4090", "epyc-9354", "1TB ddr5-5600"), "takes at most ddr5-4800"),
        (("rtx-4090", "epyc-9354", "1TB x13"), "has 12 channels, not 13"),
        (("rtx-4090", "epyc-9354", "1TB ddr5-9999"), "'ddr5-9999' is no kind of memory"),
        (("rtx-4090", "epyc-9354", "much"), "'much' is not a size"),
        (("rtx-4090", "epyc-9354", "0GB"), "host_memory_bytes must be finite and positive"),
    ],
)
def test_parts_that_are_not_there_or_do_not_go_together(chosen, said):
    with pytest.raises(InvalidInput, match=said):
        compose(*chosen)


def test_fields_given_are_checked():
    with pytest.raises(InvalidInput, match="unknown hardware key pcie"):
        compose("rtx-4090", "epyc-9354", "1TB", pcie=4)
    with pytest.raises(InvalidInput, match="h2d_bytes_per_s must be finite and positive"):
        compose("rtx-4090", "epyc-9354", "1TB", h2d_bytes_per_s=float("nan"))


def test_no_rate_is_above_the_links_peak():
    with pytest.raises(InvalidInput, match=r"h2d_bytes_per_s 40.0 GB/s is above .* by 8.5 GB/s"):
        compose("rtx-4090", "epyc-9354", "1TB", h2d_bytes_per_s=40e9)
    h200 = HardwareSpec.from_name("h200")
    with pytest.raises(InvalidInput, match="zero_copy_bytes_per_s .* above the link's peak"):
        dataclasses.replace(h200, zero_copy_bytes_per_s=64e9)
    with pytest.raises(InvalidInput, match="above the link's peak"):
        h200.with_(h2d_bytes_per_s=100e9, link_peak_bytes_per_s=63e9)
    # Another link than the machine's: what if?
    faster = h200.with_(h2d_bytes_per_s=100e9)
    assert faster.link_peak_bytes_per_s is None and faster.h2d_bytes_per_s == 100e9
    assert h200.with_(launch_s=1e-6).link_peak_bytes_per_s == h200.link_peak_bytes_per_s


def test_a_gpu_is_no_machine():
    with pytest.raises(InvalidInput, match=r"'RTX-4090' is a GPU.*rtx-4090\+epyc-9354\+384GB"):
        HardwareSpec.from_name("RTX-4090")


def test_names_of_machines_by_their_parts():
    a = HardwareSpec.from_name("RTX-4090+EPYC-9354+384GB ddr5-4800 x12+pcie4-x8")
    b = compose("rtx-4090", "epyc-9354", "384GB x12", "pcie4-x8")
    assert dataclasses.replace(a, name="x") == dataclasses.replace(b, name="x")
    with pytest.raises(InvalidInput, match="names no machine by its parts: write GPU"):
        HardwareSpec.from_name("rtx-4090+epyc-9354")


def test_yaml_with_parts(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\n"
        "parts: {gpu: rtx-4090, cpu: epyc-9354, memory: 384GB}\n"
        'h2d_bytes_per_s: {value: 26.1e9, source: "measured: 1 GiB copies"}\n'
        "price_usd: 9000\n"
    )
    hw = HardwareSpec.from_yaml(path)
    assert (hw.name, hw.h2d_bytes_per_s, hw.price_usd) == ("mine", 26.1e9, 9000)
    assert hw.kind("h2d_bytes_per_s") == "measured"
    assert hw.source["price_usd"] == "stated in mine.yaml"
    assert hw.d2h_bytes_per_s == 26.1e9
    path.write_text("parts: {gpu: rtx-4090, cpu: epyc-9354, memory: 384e9}\n")
    assert HardwareSpec.from_yaml(path).host_memory_bytes == 384e9
    for parts_, said in (("[l4]", "parts must name gpu"), ("{gpu: l4}", "parts must name gpu")):
        path.write_text(f"parts: {parts_}\n")
        with pytest.raises(InvalidInput, match=rf"mine\.yaml: {said}"):
            HardwareSpec.from_yaml(path)
    path.write_text("parts: {gpu: l5, cpu: epyc-9354, memory: 384GB}\n")
    with pytest.raises(InvalidInput, match=r"mine\.yaml: 'l5' is no GPU"):
        HardwareSpec.from_yaml(path)


def test_machines_of_the_catalogue_differ_and_say_where_from():
    rates = {name: HardwareSpec.from_name(name) for name in catalogue()}
    assert len({dataclasses.replace(hw, name="x") for hw in rates.values()}) == len(rates)
    for name, hw in rates.items():
        assert hw.name == name and "no source" not in hw.source.values()
        assert hw.kind("host_memory_bytes") != "no source"


def test_plans_and_simulates():
    hw = HardwareSpec.from_name("workstation-4090")
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    s = mg.Strategy(B=512, b_a=64, b_e=8192, s_expert=8 * model.expert_bytes, omega=0.5)
    mg.memory(model, hw, s, mg.Workload.uniform(512, 512, 128)).require()
    g = mg.build(model, s, phase="decode", kv_len=600)
    # The weights of a step over the link, and no less.
    weights_s = (model.weight_bytes - model.head_bytes) / hw.h2d_bytes_per_s
    assert 1.0 <= mg.simulate(g, mg.CostModel.roofline(hw), steps=2).period_s / weights_s < 2


def test_machines_that_differ_by_their_link_have_names_that_do():
    plain, other = (
        HardwareSpec.from_name(f"rtx-4090+epyc-9354+384GB{x}") for x in ("", "+pcie3-x16")
    )
    assert (plain.name, other.name) == (
        "rtx-4090+epyc-9354+384GB", "rtx-4090+epyc-9354+384GB+pcie3-x16",
    )  # fmt: skip
    assert HardwareSpec.from_name(other.name) == other
