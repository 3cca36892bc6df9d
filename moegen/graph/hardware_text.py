"""A machine in words: its values for people, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from moegen.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from moegen.graph.hardware import HardwareSpec

#: In files, what stands for a GPU where CPU threads take its place; :func:`gpu` is for people.
CPU_LANES = "none (CPU lanes)"
# How a source begins, and the kind that it is then.
_KINDS = {
    "measured": "measured",
    "data sheet": "data sheet",
    "implied by the paper": "implied by the paper",
    "assumed": "assumed",
    "MoE-Gen": "the paper",
    "set by the caller": "set by the caller",
    "NVML": "read from the system",
    "/proc": "read from the system",
    "cgroup": "read from the system",
    "sysconf": "read from the system",
    "host name": "read from the system",
}


def gpu(name: str) -> str:
    """A ``gpu_name`` for people."""
    return "CPU lanes (no GPU)" if name == CPU_LANES else name


def kind(source: str) -> str:
    """The kind of a source in a word or two; see :meth:`HardwareSpec.kind`."""
    if not source:
        return "no source"
    return next((kind for start, kind in _KINDS.items() if source.startswith(start)), "stated")


def rate(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s"


def _teraflops(value: float) -> str:
    return f"{value / 1e12:.4g} TFLOP/s"


def _reached(curve: tuple[tuple[float, float], ...]) -> str:
    (_, least), (_, most) = curve[0], curve[-1]
    return f"{least:.1%} to {most:.0%}"


# What no prediction rests on, or a plan alone.
_NO_RATES = {
    "gpu_memory_bytes", "host_memory_bytes", "gpu_workspace_bytes", "price_usd", "power_w",
    "rental_usd_per_hour", "link_peak_bytes_per_s",
}  # fmt: skip
# What print() shows: the field, what to call it, and its value for people.
_LINES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("gpu_memory_bytes", "GPU memory", format_bytes),
    ("host_memory_bytes", "host memory", format_bytes),
    ("gpu_flops", "GPU products", _teraflops),
    ("gpu_efficiency", "GPU efficiency", _reached),
    ("gpu_bytes_per_s", "GPU memory rate", rate),
    ("launch_s", "least time of a kernel", format_seconds),
    ("h2d_bytes_per_s", "link to the GPU", rate),
    ("d2h_bytes_per_s", "link from the GPU", rate),
    ("duplex_bytes_per_s", "link both ways at once", rate),
    ("duplex_d2h_bytes_per_s", "and from the GPU then", rate),
    ("link_peak_bytes_per_s", "link's peak", rate),
    ("copy_latency_s", "copy beside its bytes", format_seconds),
    ("copy_floor_s", "least time of a copy", format_seconds),
    ("zero_copy_bytes_per_s", "kernels over the link", rate),
    ("host_bytes_per_s", "host memory rate", rate),
    ("cpu_attn_bytes_per_s", "CPU attention's KV", rate),
    ("cpu_attn_flops", "CPU attention's FLOPs", _teraflops),
    ("task_s", "host code of a task", format_seconds),
    ("cpu_call_s", "call of CPU attention", format_seconds),
    ("gpu_call_s", "call on the GPU lane", format_seconds),
    ("gpu_workspace_bytes", "GPU products' workspace", format_bytes),
    ("load_bytes_per_s", "pinning of host memory", rate),
    ("price_usd", "price", "{:.0f} USD".format),
    ("power_w", "power", "{:.0f} W".format),
    ("rental_usd_per_hour", "rent", "{:.2f} USD/h".format),
)


def rates(hw: HardwareSpec) -> dict[str, str]:
    """What predictions rest on; see :meth:`HardwareSpec.rates`."""
    return {key: label for key, label, _ in _given(hw) if key not in _NO_RATES}


def explained(hw: HardwareSpec) -> str:
    """Each field's value with its source in full, a line each."""
    lines = (
        f"  {key:<22} {text:>16}  {hw.source.get(key, 'no source')}" for key, _, text in _given(hw)
    )
    return "\n".join([_title(hw), *lines])


def shown(hw: HardwareSpec) -> str:
    """Each value with the kind of its source, a line each."""
    lines = (f"  {label:<22} {text:>16}  {hw.kind(key)}" for key, label, text in _given(hw))
    return "\n".join([_title(hw), *lines, "  hw.explain() gives each source in full"])


def _title(hw: HardwareSpec) -> str:
    return f"HardwareSpec {hw.name}: {gpu(hw.gpu_name)}; {hw.cpu_name}"


def _given(hw: HardwareSpec) -> Iterator[tuple[str, str, str]]:
    """Each field that has a value: its name, what to call it, its value for people."""
    for key, label, text in _LINES:
        value = getattr(hw, key)
        if value is not None:
            yield key, label, text(value)
