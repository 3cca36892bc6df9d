"""Nothing is faster than the data sheet says: a measurement that is, is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moegen.errors import InvalidInput
from moegen.graph.curve import Curve
from moegen.graph.hardware import HardwareSpec

# A rate worked out from seconds may be above the one that they were worked out from.
_ROUNDING = 1 + 1e-9


def check_peaks(
    machine: HardwareSpec, memory: Mapping[str, float], curves: Sequence[Curve]
) -> None:
    """Refuse rates and points of curves that are above a peak.

    Parameters
    ----------
    machine : HardwareSpec
        With the peaks of the link and of the GPU's arithmetic.
    memory : mapping of str to float
        Those of ``gpu_bytes_per_s`` and ``host_bytes_per_s`` that are known.
    curves : sequence of Curve

    Raises
    ------
    InvalidInput
        Naming the rate or the point, and the peak.
    """
    for key, peak in memory.items():
        if getattr(machine, key) > peak * _ROUNDING:
            raise InvalidInput(
                f"machine: {key} is {getattr(machine, key):g}, above its peak of {peak:g}"
            )
    for curve in curves:
        limits = _limits(machine, memory, curve.ops[0])
        for index, at, seconds in curve.points():
            for what, unit, units in uses(at):
                peak = limits.get(what)
                if peak is not None and units / seconds > peak * _ROUNDING:
                    raise InvalidInput(
                        f"{curve.describe(index)}: {seconds:g} s would be "
                        f"{units / seconds / 1e9:.4g} G{unit}/s, above the peak of "
                        f"{peak / 1e9:.4g} G{unit}/s: the measurement is wrong"
                    )


def _limits(machine: HardwareSpec, memory: Mapping[str, float], op: str) -> dict[str, float | None]:
    """What a point of ``op`` cannot be faster than, by what it uses."""
    on_cpu = op == "attn_cpu"
    return {
        "link": machine.link_peak_bytes_per_s,
        "memory": memory.get("host_bytes_per_s" if on_cpu else "gpu_bytes_per_s"),
        "flops": None if on_cpu else machine.gpu_flops,
    }


def uses(at: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """What a point of a curve uses up: of what, in which unit, and how much."""
    for name in ("h2d_bytes", "d2h_bytes"):
        if name in at:
            yield "link", "B", at[name]
    if "gpu_bytes" in at:
        yield "memory", "B", at["gpu_bytes"]
    if "rows" in at:
        nbytes = at["rows"] * at["bytes_per_row"]
        yield "memory", "B", nbytes
        yield "flops", "FLOP", nbytes * at["flops_per_byte"]
    if "prompt_tokens" in at:
        yield "flops", "FLOP", at["prompt_tokens"] * at["attended_flops"]
    if "tokens" in at:
        yield "flops", "FLOP", at["tokens"] * at["flops_per_token"] * at.get("launches", 1)
