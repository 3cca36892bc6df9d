"""What this machine is: read from NVML and /proc, the rest assumed and marked so."""

from __future__ import annotations

import importlib
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from moegen.graph.hardware import CPU_LANES, HardwareSpec
from moegen.graph.hardware_parts import by_driver_name, part
from moegen.graph.host_memory import total_bytes
from moegen.units import MIB

# PCIe data rate of one lane by generation, after encoding, bytes per second.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# Measured against nominal on one PCIe 5.0 machine: 55.0 of 63.0 GB/s.
_LINK_SHARE = 0.87
# What a GPU that the catalogue does not have is taken for.
_UNKNOWN_GPU = "rtx-a5000"


def detect(root: str | Path = "/") -> HardwareSpec:
    """This machine as a HardwareSpec; rates nobody reported are assumed by class.

    Parameters
    ----------
    root : path
        Where ``proc`` and ``sys`` are found.

    Raises
    ------
    MachineError
        If the size of host memory cannot be read.
    """
    root = Path(root)
    host, host_source = total_bytes(root)
    n_cores = cores()
    values: dict[str, Any] = {
        "name": platform.node() or "this machine",
        "cpu_name": cpu_name(root),
        "host_memory_bytes": host,
        "gpu_efficiency": ((1, 0.004), (64, 0.1), (256, 0.45), (1024, 0.68), (4096, 0.74)),
        "launch_s": 1e-5,
        "duplex_bytes_per_s": None,
        "copy_latency_s": 1.4e-5,
        "cpu_attn_flops": n_cores * 25e9,
        "host_bytes_per_s": min(n_cores * 6e9, 150e9),
        "cpu_attn_bytes_per_s": min(n_cores * 6e9, 100e9),
        "gpu_workspace_bytes": 32 * MIB,
    }
    source = {
        "name": "host name",
        "cpu_name": "/proc/cpuinfo and the process's CPU affinity",
        "host_memory_bytes": host_source,
        "gpu_efficiency": "assumed: the shape measured on one H200 machine",
        "launch_s": "assumed: 10 us a kernel",
        "duplex_bytes_per_s": "assumed: directions do not slow each other",
        "copy_latency_s": "assumed: 14 us, measured on one H200 machine",
        "cpu_attn_flops": "assumed: 25 GFLOP/s a core",
        "host_bytes_per_s": "assumed: 6 GB/s a core, at most 150 GB/s",
        "cpu_attn_bytes_per_s": "assumed: 6 GB/s a core, at most 100 GB/s",
        "gpu_workspace_bytes": "assumed: torch's workspace for cuBLAS on Hopper, the largest",
    }
    found = _gpu()
    if isinstance(found, str):
        # Lanes are then all CPU threads: a copy is a memcpy, "GPU memory" is host memory.
        why = f"assumed: {found}; CPU lanes stand in"
        gpu = {
            "gpu_name": CPU_LANES,
            "gpu_memory_bytes": host,
            "gpu_flops": n_cores * 50e9,
            "gpu_efficiency": ((1, 0.1), (64, 1.0)),
            "gpu_bytes_per_s": values["host_bytes_per_s"],
            "h2d_bytes_per_s": values["host_bytes_per_s"] / 2,
            "d2h_bytes_per_s": values["host_bytes_per_s"] / 2,
            "zero_copy_bytes_per_s": values["host_bytes_per_s"] / 2,
            "gpu_workspace_bytes": None,
        }
        gpu_source = dict.fromkeys(gpu, why)
    else:
        gpu, gpu_source = found
    return HardwareSpec(**values | gpu, source=source | gpu_source)


def _gpu() -> tuple[dict[str, Any], dict[str, str]] | str:
    """Fields of the GPU that CUDA would take and their sources, or why there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "no GPU seen (nvidia-ml-py is not installed)"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        return f"no GPU seen (NVML: {e})"
    try:
        handle = _first_visible(nvml)
        if handle is None:
            return f"no GPU seen (CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r})"
        name = nvml.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else name
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        width = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError as e:
        return f"no GPU seen (NVML: {e})"
    finally:
        nvml.nvmlShutdown()
    known = by_driver_name(name)
    like = known or part("gpu", _UNKNOWN_GPU)
    of_class = "assumed: data sheet of class " + (
        known.values["nvml"] if known else "A5000, this GPU is not in the table"
    )
    link = _LANE_BYTES_PER_S.get(generation, _LANE_BYTES_PER_S[4]) * width * _LINK_SHARE
    of_link = f"assumed: {_LINK_SHARE:.0%} of PCIe {generation}.0 x{width} as NVML reports it"
    return {
        "gpu_name": name,
        "gpu_memory_bytes": memory,
        "gpu_flops": like.values["gpu_flops"],
        "gpu_bytes_per_s": like.values["gpu_bytes_per_s"],
        "h2d_bytes_per_s": link,
        "d2h_bytes_per_s": link,
        "zero_copy_bytes_per_s": link * 0.9,
    }, {
        "gpu_name": "NVML",
        "gpu_memory_bytes": "NVML",
        "gpu_flops": of_class,
        "gpu_bytes_per_s": of_class,
        "h2d_bytes_per_s": of_link,
        "d2h_bytes_per_s": of_link,
        "zero_copy_bytes_per_s": f"{of_link}, and 90% of that",
    }


def _first_visible(nvml: Any) -> Any:
    """NVML's handle of CUDA's device 0, or None if CUDA_VISIBLE_DEVICES hides every GPU.

    Like CUDA it takes an index or the beginning of a UUID, and sees nothing where the first
    entry names no GPU. Indices are NVML's: CUDA's are the same if all GPUs are, or with
    CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    first = visible.split(",")[0].strip()
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
        if first == str(index) or (first.startswith("GPU-") and uuid.startswith(first)):
            return handle
    return None


def cpu_name(root: str | Path = "/") -> str:
    """The CPU as its maker calls it, and the cores that this process may use."""
    name = platform.processor() or platform.machine() or "unknown CPU"
    with suppress(OSError):
        for line in (Path(root) / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {cores()} cores"


def cores() -> int:
    """Cores this process may use, where the system can tell; else those it has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
