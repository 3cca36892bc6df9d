"""HardwareSpec: one machine as rates and capacities, each with its source."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moegen.errors import InvalidInput
from moegen.units import format_bytes

CATALOGUE = Path(__file__).parent.parent / "data" / "hardware"
_OPTIONAL = {"duplex_bytes_per_s", "price_usd", "power_w"}
_TEXT = {"name", "gpu_name", "cpu_name"}


@dataclass(frozen=True)
class HardwareSpec:
    """One machine. Rates are what the part delivers, not what its box says.

    Parameters
    ----------
    gpu_memory_bytes, host_memory_bytes : float
        Capacities.
    gpu_flops : float
        Peak dense bf16 FLOP/s.
    gpu_efficiency : tuple of (tokens, share)
        Share of ``gpu_flops`` that a matrix product over so many tokens reaches; both rise.
    gpu_bytes_per_s : float
        Bandwidth of GPU memory.
    launch_s : float
        Least time of a kernel.
    h2d_bytes_per_s, d2h_bytes_per_s : float
        Link, one direction at a time, large pinned copies.
    duplex_bytes_per_s : float or None
        Each direction while both run; None where that makes no difference.
    copy_latency_s : float
        Least time of a copy.
    zero_copy_bytes_per_s : float
        A kernel that reads or writes pinned host memory.
    cpu_flops : float
        FLOP/s of the CPU's matrix products.
    host_bytes_per_s : float
        Host memory, all cores streaming.
    cpu_attn_bytes_per_s, cpu_attn_flops : float
        Decode attention on the CPU: KV bytes a second, and FLOP/s where arithmetic binds.
    price_usd, power_w : float or None
        Of the whole machine, where known.
    source : dict
        Where the value of each field comes from.
    """

    name: str
    gpu_name: str
    cpu_name: str
    gpu_memory_bytes: float
    host_memory_bytes: float
    gpu_flops: float
    gpu_efficiency: tuple[tuple[float, float], ...]
    gpu_bytes_per_s: float
    launch_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex_bytes_per_s: float | None
    copy_latency_s: float
    zero_copy_bytes_per_s: float
    cpu_flops: float
    host_bytes_per_s: float
    cpu_attn_bytes_per_s: float
    cpu_attn_flops: float
    price_usd: float | None = None
    power_w: float | None = None
    source: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for key in field_names():
            value = getattr(self, key)
            if key in _TEXT:
                if not isinstance(value, str) or not value:
                    raise InvalidInput(f"{key} must be a name, got {value!r}")
            elif key == "gpu_efficiency":
                object.__setattr__(self, key, _curve(value))
            elif not (value is None and key in _OPTIONAL):
                object.__setattr__(self, key, _positive(key, value))

    @classmethod
    def from_name(cls, name: str) -> HardwareSpec:
        """A machine of the catalogue: c1, c2, c3 (the paper's testbeds), h200.

        Raises
        ------
        InvalidInput
            If the catalogue has no such machine.
        """
        path = CATALOGUE / f"{str(name).lower()}.yaml"
        if str(name).lower() not in catalogue():
            raise InvalidInput(
                f"{name!r} is no machine of the catalogue: it has {', '.join(catalogue())}; "
                f"a file of your own goes to HardwareSpec.from_yaml"
            )
        return cls.from_yaml(path)

    @classmethod
    def from_yaml(cls, path: str | Path) -> HardwareSpec:
        """From a file of ``field: {value: ..., source: ...}``, or ``field: value``, in SI units.

        Raises
        ------
        InvalidInput
            If the file cannot be read, or a key is unknown, missing or out of range.
        """
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
            raise InvalidInput(f"{path} cannot be read as YAML: {e}") from e
        if not isinstance(data, dict):
            raise InvalidInput(f"{path} must hold keys and values, got {type(data).__name__}")
        values: dict[str, Any] = {}
        source: dict[str, str] = {}
        for key, entry in data.items():
            if isinstance(entry, dict):
                if "value" not in entry or entry.keys() - {"value", "source"}:
                    raise InvalidInput(f"{path}: {key} must have the keys value and source")
                values[key] = entry["value"]
                source[key] = str(entry.get("source", f"stated in {Path(path).name}"))
            else:
                values[key] = entry
                source[key] = f"stated in {Path(path).name}"
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        try:
            _check_keys(values, required)
            return cls(**values, source=source)
        except InvalidInput as e:
            raise InvalidInput(f"{path}: {e}") from e

    @classmethod
    def detect(cls) -> HardwareSpec:
        """This machine: what can be read is, the rest is assumed and says so in ``source``."""
        from moegen.graph.detect import detect

        return detect()

    def with_(self, **changes: Any) -> HardwareSpec:
        """A copy with some fields changed.

        Raises
        ------
        InvalidInput
            If a field is unknown, or its value is not a finite positive number.
        """
        _check_keys(changes, set())
        source = self.source | {key: "set by the caller" for key in changes}
        return dataclasses.replace(self, **changes, source=source)

    def efficiency(self, tokens: float) -> float:
        """Share of ``gpu_flops`` at ``tokens``: linear in between, flat beyond the ends."""
        curve = self.gpu_efficiency
        if tokens <= curve[0][0]:
            return curve[0][1]
        for (t0, e0), (t1, e1) in zip(curve, curve[1:], strict=False):
            if tokens <= t1:
                return e0 + (e1 - e0) * (tokens - t0) / (t1 - t0)
        return curve[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HardwareSpec:
        """The inverse of :meth:`to_dict`."""
        _check_keys({k: v for k, v in data.items() if k != "source"}, set(field_names()))
        return cls(**data)

    def __str__(self) -> str:
        rows = [
            f"HardwareSpec {self.name}: {self.gpu_name}, {self.cpu_name}",
            f"  memory     GPU {format_bytes(self.gpu_memory_bytes)}, "
            f"host {format_bytes(self.host_memory_bytes)}",
            f"  GPU        {self.gpu_flops / 1e12:.0f} TFLOP/s, "
            f"{self.gpu_bytes_per_s / 1e9:.0f} GB/s",
            f"  link       {self.h2d_bytes_per_s / 1e9:.1f} GB/s up, "
            f"{self.d2h_bytes_per_s / 1e9:.1f} GB/s down",
            f"  CPU        {self.host_bytes_per_s / 1e9:.0f} GB/s, "
            f"attention {self.cpu_attn_bytes_per_s / 1e9:.0f} GB/s",
        ]
        return "\n".join(rows)


def field_names() -> list[str]:
    """The fields that a YAML file or ``with_`` may set."""
    return [f.name for f in dataclasses.fields(HardwareSpec) if f.name != "source"]


def catalogue() -> list[str]:
    """Names of the machines that ship with moegen."""
    return sorted(p.stem for p in CATALOGUE.glob("*.yaml"))


def _check_keys(values: dict[str, Any], required: set[str]) -> None:
    unknown = [str(key) for key in values if key not in field_names()]
    if unknown:
        raise InvalidInput(
            f"unknown hardware key {', '.join(unknown)}; known are {', '.join(field_names())}"
        )
    missing = [key for key in field_names() if key in required and key not in values]
    if missing:
        raise InvalidInput(f"hardware key {', '.join(missing)} is missing")


def _positive(key: str, value: Any) -> float:
    try:
        # YAML reads 1e9 (no dot, no sign) as text, so numbers may come as strings.
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"{key} must be a positive number, got {value!r}") from None
    if isinstance(value, bool) or not math.isfinite(number) or number <= 0:
        raise InvalidInput(f"{key} must be finite and positive, got {value!r}")
    return int(number) if key.endswith("memory_bytes") else number


def _curve(points: Any) -> tuple[tuple[float, float], ...]:
    key = "gpu_efficiency"
    try:
        curve = tuple((_positive(key, t), _positive(key, share)) for t, share in points)
    except (TypeError, ValueError) as e:
        raise InvalidInput(f"{key} must be pairs of tokens and share, got {points!r}: {e}") from e
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(curve, curve[1:], strict=False))
    if not curve or not rising or curve[-1][1] > 1:
        raise InvalidInput(
            f"{key} must rise in tokens, not fall in share, and stay at most 1, got {points!r}"
        )
    return curve
