"""HardwareSpec: the catalogue, validation, what detect() reads."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types

import pytest

from moegen.errors import InvalidInput, MachineError
from moegen.graph import detect as detect_module
from moegen.graph.detect import detect
from moegen.graph.hardware import CATALOGUE, HardwareSpec, catalogue, field_names


@pytest.mark.parametrize("name", ["c1", "c2", "c3", "h200"])
def test_catalogue_has_a_source_for_every_value(name):
    hw = HardwareSpec.from_name(name)
    assert hw.name == name
    given = {key for key in field_names() if getattr(hw, key) is not None}
    assert given <= hw.source.keys() and all(hw.source.values())


@pytest.mark.parametrize("name", ["c1", "c2", "c3"])
def test_print_says_which_rates_come_from_the_papers_own_throughputs(name):
    lines = str(HardwareSpec.from_name(name)).splitlines()
    kinds = {line[2:24].strip(): line[42:].strip() for line in lines[1:-1]}
    assert kinds["link to the GPU"] == kinds["CPU attention's KV"] == "implied by the paper"
    assert kinds["GPU efficiency"] == "implied by the paper"
    assert kinds["GPU products"] == "data sheet"
    assert kinds["link from the GPU"] == "assumed" and kinds["host memory"] == "the paper"
    assert "hw.explain()" in lines[-1]


def test_explain_gives_sources_whole():
    hw = HardwareSpec.from_name("h200").with_(launch_s=1e-6)
    lines = hw.explain().splitlines()[1:]
    sources = {line.split()[0]: line for line in lines}
    assert all(line.endswith(f"  {hw.source[key]}") for key, line in sources.items())
    assert sources.keys() == {
        key for key in field_names() if "name" not in key and getattr(hw, key) is not None
    }


def test_kinds_of_sources():
    hw = HardwareSpec.from_name("h200").with_(launch_s=1e-6)
    kinds = {
        key: hw.kind(key)
        for key in ("h2d_bytes_per_s", "rental_usd_per_hour", "launch_s", "power_w")
    }
    assert list(kinds.values()) == ["measured", "assumed", "set by the caller", "no source"]
    assert dataclasses.replace(hw, source={"launch_s": "my notes"}).kind("launch_s") == "stated"
    with pytest.raises(InvalidInput, match="no such field: 'pcie'"):
        hw.kind("pcie")


def test_capacities_of_the_testbeds_are_decimal():
    sizes = [
        (hw.gpu_memory_bytes, hw.host_memory_bytes)
        for hw in map(HardwareSpec.from_name, ("c1", "c2", "c3"))
    ]
    assert sizes == [(24e9, 256e9), (24e9, 512e9), (48e9, 480e9)]


def test_price_and_power_of_table_5():
    hw = HardwareSpec.from_name("C2")
    assert (hw.price_usd, hw.power_w) == (2500 + 1200 + 1100, 200 + 100 + 80)


def test_h200_efficiency_gives_the_measured_rates():
    hw = HardwareSpec.from_name("h200")
    for tokens, tflops in ((256, 452), (1024, 673), (4096, 727)):
        assert hw.gpu_flops * hw.efficiency(tokens) / 1e12 == pytest.approx(tflops, rel=0.01)
    # Three matmuls of 64 tokens take about the 0.14 ms floor.
    flops = 2 * 64 * 3 * 4096 * 14336
    assert flops / (hw.gpu_flops * hw.efficiency(64)) == pytest.approx(1.4e-4, rel=0.05)


def test_efficiency_is_linear_between_and_flat_outside():
    hw = HardwareSpec.from_name("c1").with_(gpu_efficiency=[(10, 0.2), (20, 0.6)])
    assert [hw.efficiency(t) for t in (1, 10, 15, 20, 99)] == pytest.approx(
        [0.2, 0.2, 0.4, 0.6, 0.6]
    )


def test_unknown_name():
    with pytest.raises(InvalidInput, match="'c9' is no machine.*c1, c2, c3, h200"):
        HardwareSpec.from_name("c9")
    with pytest.raises(InvalidInput, match=r"this machine is HardwareSpec\.detect\(\)"):
        HardwareSpec.from_name("here")  # as --hw has it


def test_with_changes_one_field_and_its_source():
    hw = HardwareSpec.from_name("c2")
    fast = hw.with_(h2d_bytes_per_s=50e9, host_memory_bytes=1e12)
    assert (fast.h2d_bytes_per_s, fast.host_memory_bytes) == (50e9, 10**12)
    assert fast.d2h_bytes_per_s == hw.d2h_bytes_per_s
    assert fast.source["h2d_bytes_per_s"] == "set by the caller"
    assert hw.h2d_bytes_per_s == 25e9
    assert hw.with_(duplex_bytes_per_s=None).duplex_bytes_per_s is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, -1.0, "fast", True, None, []])
@pytest.mark.parametrize("key", ["h2d_bytes_per_s", "gpu_memory_bytes", "launch_s"])
def test_with_refuses_what_is_no_rate(key, value):
    with pytest.raises(InvalidInput, match=key) as e:
        HardwareSpec.from_name("c2").with_(**{key: value})
    assert repr(value) in str(e.value)


@pytest.mark.parametrize(
    "curve",
    [
        [],
        0.5,
        [(1, 0.5), (1, 0.6)],
        [(1, 0.5), (2, 0.4)],
        [(1, 0.5), (2, 1.5)],
        [(1, math.nan)],
        [1],
    ],
)
def test_with_refuses_a_curve_that_falls(curve):
    with pytest.raises(InvalidInput, match="gpu_efficiency"):
        HardwareSpec.from_name("c2").with_(gpu_efficiency=curve)


LINK = (
    "h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_bytes_per_s", "duplex_d2h_bytes_per_s",
    "zero_copy_bytes_per_s",
)  # fmt: skip


@pytest.mark.parametrize("key", LINK)
def test_no_rate_is_above_the_links_peak(key):
    hw = HardwareSpec.from_name("c2").with_(link_peak_bytes_per_s=32e9)
    with pytest.raises(InvalidInput, match=rf"{key} 33\.0 GB/s is above the link's peak"):
        dataclasses.replace(hw, **{key: 33e9})
    with pytest.raises(InvalidInput, match=rf"{key} 33\.0 GB/s is above"):
        hw.with_(**{key: 33e9}, link_peak_bytes_per_s=32e9)
    assert getattr(hw.with_(**{key: 33e9}), key) == 33e9  # another link


def test_with_refuses_an_unknown_key():
    with pytest.raises(InvalidInput, match="unknown hardware key pcie; known are name, gpu_name"):
        HardwareSpec.from_name("c2").with_(pcie=4)


def test_yaml_of_ones_own(tmp_path):
    text = (CATALOGUE / "c1.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text + "power_w: 1e3\n")  # YAML reads 1e3 as text
    hw = HardwareSpec.from_yaml(path)
    assert hw.power_w == 1000 and hw.source["power_w"] == "stated in mine.yaml"
    path.write_text(text + "speed: 3\n")
    with pytest.raises(InvalidInput, match=r"mine\.yaml: unknown hardware key speed"):
        HardwareSpec.from_yaml(path)
    path.write_text(text.replace("launch_s", "power_w"))
    with pytest.raises(InvalidInput, match=r"mine\.yaml: hardware key launch_s is missing"):
        HardwareSpec.from_yaml(path)
    path.write_text("[")
    with pytest.raises(InvalidInput, match=r"mine\.yaml cannot be read as YAML"):
        HardwareSpec.from_yaml(path)
    with pytest.raises(InvalidInput, match=r"none\.yaml cannot be read: No such file"):
        HardwareSpec.from_yaml(tmp_path / "none.yaml")


def test_a_profile_is_no_machine(tmp_path):
    """It was said to lack sources of its versions."""
    path = tmp_path / "here.json"
    path.write_text(json.dumps({"format": "moegen.profile/4", "versions": {"torch": "2.11.0"}}))
    with pytest.raises(InvalidInput, match=r"here.json is no machine, it is a file of moegen.prof"):
        HardwareSpec.from_yaml(path)


def test_dict_round_trip():
    for name in catalogue():
        hw = HardwareSpec.from_name(name)
        again = HardwareSpec.from_dict(json.loads(json.dumps(hw.to_dict())))
        assert again == hw and again.source == hw.source and hash(again) == hash(hw)
    data = HardwareSpec.from_name("c2").to_dict()
    assert HardwareSpec.from_dict({k: v for k, v in data.items() if k != "price_usd"}) is not None
    with pytest.raises(InvalidInput, match="hardware key launch_s is missing"):
        HardwareSpec.from_dict({k: v for k, v in data.items() if k != "launch_s"})


def machine(tmp_path, *, cgroup: str = "", files: dict[str, str] | None = None):
    """A false root with 64 GiB of memory."""
    for name, text in {
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\n",
        "proc/cpuinfo": "model name\t: Test CPU\n",
        "proc/self/cgroup": cgroup,
        **(files or {}),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_detect_without_a_gpu_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hw = detect(machine(tmp_path))
    assert hw.gpu_name == "none (CPU lanes)" and hw.cpu_name.startswith("Test CPU, ")
    assert hw.host_memory_bytes == 64 * 2**30 and hw.source["host_memory_bytes"] == "/proc/meminfo"
    assert hw.kind("host_memory_bytes") == "read from the system"
    for said in (str(hw), hw.explain()):  # what a file has is not for people
        assert said.startswith(f"HardwareSpec {hw.name}: CPU lanes (no GPU); Test CPU, ")
    assert "no GPU seen" in hw.source["gpu_flops"] and "assumed" in hw.source["h2d_bytes_per_s"]
    given = {key for key in field_names() if getattr(hw, key) is not None}
    assert given <= hw.source.keys()


@pytest.mark.parametrize(
    ("cgroup", "files", "gib"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": str(8 * 2**30)}, 8),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": str(8 * 2**30)}, 8),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "max"}, 64),
        ("0::/\n", {"sys/fs/cgroup/memory.max": str(99 * 2**30)}, 64),
        ("4:memory:/j\n", {"sys/fs/cgroup/memory/j/memory.limit_in_bytes": str(4 * 2**30)}, 4),
        ("4:memory:/j\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**62)}, 64),
    ],
)
def test_detect_obeys_the_cgroup(tmp_path, monkeypatch, cgroup, files, gib):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect(machine(tmp_path, cgroup=cgroup, files=files)).host_memory_bytes == gib * 2**30


def test_detect_without_any_way_to_see_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(detect_module.os, "sysconf_names", {})
    with pytest.raises(MachineError, match="host memory cannot be read"):
        detect(tmp_path)


class NoNVML(Exception):
    """Stands in for pynvml.NVMLError."""


UUIDS = ("GPU-1c3e5a70-0000-4444-8888-000000000000", "GPU-1c3e9b21-0000-4444-8888-000000000001")


def false_nvml(*names: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        NVMLError=NoNVML,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetUUID=lambda h: UUIDS[h],
        nvmlDeviceGetName=lambda h: names[h],
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(total=80 * 2**30),
        nvmlDeviceGetMaxPcieLinkGeneration=lambda h: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda h: 16,
    )


@pytest.mark.parametrize(
    ("name", "flops", "source"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, "class H100"),
        ("NVIDIA A100-SXM4-80GB", 312e12, "class A100"),
        ("NVIDIA H100 PCIe", 756e12, "class H100 PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12, "class RTX 6000 Ada"),
        ("NVIDIA L40S", 362e12, "class L40S"),
        ("NVIDIA Mystery 1", 111.1e12, "this GPU is not in the table"),
    ],
)
def test_detect_with_a_gpu(tmp_path, monkeypatch, name, flops, source):
    monkeypatch.setitem(sys.modules, "pynvml", false_nvml(name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hw = detect(machine(tmp_path))
    assert (hw.gpu_name, hw.gpu_memory_bytes, hw.gpu_flops) == (name, 80 * 2**30, flops)
    assert hw.source["gpu_memory_bytes"] == "NVML" and source in hw.source["gpu_flops"]
    assert hw.h2d_bytes_per_s == pytest.approx(55e9, rel=0.01)
    assert "assumed" in hw.source["h2d_bytes_per_s"]


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        ("1", "NVIDIA L4"),
        ("1,0", "NVIDIA L4"),
        (" 0 ", "NVIDIA A10"),
        (UUIDS[1], "NVIDIA L4"),
        ("GPU-1c3e9", "NVIDIA L4"),
        ("", None),
        ("-1", None),
        ("2,0", None),
        ("GPU-ffff", None),
    ],
)
def test_detect_takes_the_gpu_that_cuda_takes(tmp_path, monkeypatch, visible, name):
    monkeypatch.setitem(sys.modules, "pynvml", false_nvml("NVIDIA A10", "NVIDIA L4"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    hw = detect(machine(tmp_path))
    assert hw.gpu_name == (name or "none (CPU lanes)")
    if name is None:
        assert f"CUDA_VISIBLE_DEVICES is {visible!r}" in hw.source["gpu_name"]


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(detect_module.os, "sched_getaffinity", lambda _: {3, 5, 9}, raising=False)
    assert detect_module.cores() == 3
    monkeypatch.delattr(detect_module.os, "sched_getaffinity")
    monkeypatch.setattr(detect_module.os, "cpu_count", lambda: None)
    assert detect_module.cores() == 1


def test_detect_here():
    assert HardwareSpec.detect().host_memory_bytes > 2**28
