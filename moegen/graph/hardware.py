"""HardwareSpec: one machine as rates and capacities, each with its source."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput
from moegen.graph import hardware_parts, hardware_text
from moegen.graph.hardware_files import read_yaml, with_sources
from moegen.units import MIB

#: What stands for a GPU where CPU threads take its place.
CPU_LANES = hardware_text.CPU_LANES
CATALOGUE = Path(__file__).parent.parent / "data" / "hardware"
_OPTIONAL = {
    "task_s", "cpu_call_s", "gpu_call_s", "duplex_bytes_per_s", "duplex_d2h_bytes_per_s",
    "link_peak_bytes_per_s", "copy_floor_s", "gpu_workspace_bytes", "load_bytes_per_s",
    "price_usd", "power_w", "rental_usd_per_hour",
}  # fmt: skip
_OF_THE_LINK = (
    "h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_bytes_per_s", "duplex_d2h_bytes_per_s",
    "zero_copy_bytes_per_s",
)  # fmt: skip
_TEXT = {"name", "gpu_name", "cpu_name"}


@dataclass(frozen=True)
class HardwareSpec:
    """One machine: capacities, and rates as the parts deliver them.

    One rate is a peak that nothing delivers: ``gpu_flops``. The curve ``gpu_efficiency``
    makes it real.

    ``print(hw)`` shows each value with the kind of its source (see :meth:`kind`),
    ``hw.explain()`` the sources in full.

    Parameters
    ----------
    gpu_memory_bytes, host_memory_bytes : float
        Capacities.
    gpu_flops : float
        Dense bf16 FLOP/s of the data sheet. No product reaches it.
    gpu_efficiency : tuple of (tokens, share)
        Share of ``gpu_flops`` that a matrix product over so many tokens reaches; both rise.
    gpu_bytes_per_s : float
        Bandwidth of GPU memory.
    launch_s : float
        Least time of a kernel.
    h2d_bytes_per_s, d2h_bytes_per_s : float
        Link, one direction at a time, large pinned copies.
    duplex_bytes_per_s, duplex_d2h_bytes_per_s : float or None
        Link while both directions run: the first is the limit of each, unless the second gives
        the way from the GPU its own. None where that makes no difference.
    copy_latency_s : float
        What a copy takes beside its bytes over the link.
    copy_floor_s : float or None
        Least time of a copy, where it is more than the latency.
    zero_copy_bytes_per_s : float
        A kernel that reads or writes pinned host memory.
    host_bytes_per_s : float
        Host memory, all cores streaming.
    cpu_attn_bytes_per_s, cpu_attn_flops : float
        Decode attention on the CPU: KV bytes a second, and FLOP/s where arithmetic binds.
    task_s : float or None
        What the executor's own host code takes to hand a task over. One thread does so for all
        lanes, and a task does not begin before its turn; None where that is left out.
    cpu_call_s, gpu_call_s : float or None
        What a run of rows of one length costs decode attention beside its KV, on the CPU, and on
        the GPU lane where threads of the CPU stand in for a GPU; None where that is left out.
    gpu_workspace_bytes : float or None
        What torch gives the matrix libraries to work in; None where threads of the CPU stand in
        for a GPU, and nothing but what is asked for is taken.
    link_peak_bytes_per_s : float or None
        What one direction of the link could carry at most, by its data sheet. No rate of the
        link may be above it; None where it is not known.
    load_bytes_per_s : float or None
        How fast weights come to lie in pinned host memory: memory touched and registered, reading
        from a disk left out; None where that is not known, and loading not predicted.
    price_usd, power_w : float or None
        Of the whole machine, where known.
    rental_usd_per_hour : float or None
        What a cloud asks for it, where known.
    source : dict
        Where the value of each field comes from, in words that begin with a kind: "measured",
        "data sheet", "implied by the paper", "assumed" and so on.
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
    host_bytes_per_s: float
    cpu_attn_bytes_per_s: float
    cpu_attn_flops: float
    task_s: float | None = None
    cpu_call_s: float | None = None
    gpu_call_s: float | None = None
    gpu_workspace_bytes: float | None = 32.0 * MIB  # on a Hopper GPU; others get less
    load_bytes_per_s: float | None = None
    price_usd: float | None = None
    power_w: float | None = None
    rental_usd_per_hour: float | None = None
    link_peak_bytes_per_s: float | None = None
    duplex_d2h_bytes_per_s: float | None = None
    copy_floor_s: float | None = None
    source: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for key in field_names():
            object.__setattr__(self, key, _checked(key, getattr(self, key)))
        peak = self.link_peak_bytes_per_s
        for key in _OF_THE_LINK:
            rate = getattr(self, key)
            if peak is not None and rate is not None and rate > peak:
                shown, most, over = map(hardware_text.rate, (rate, peak, rate - peak))
                raise InvalidInput(
                    f"{key} {shown} is above the link's peak, link_peak_bytes_per_s {most}, by "
                    f"{over}: nothing crosses a link faster. For another link give its peak too"
                )

    @classmethod
    def from_name(cls, name: str) -> HardwareSpec:
        """A machine of the catalogue, or one by its parts: "rtx-4090+epyc-9354+384GB".

        c1, c2 and c3 are the paper's testbeds and h200 was measured; the others are put together
        from parts (:meth:`compose`).

        Raises
        ------
        InvalidInput
            If the catalogue has no such machine or part.
        """
        name = str(name)
        if "+" in name:
            return cls.compose(**hardware_parts.split(name))
        if name.lower() in hardware_parts.parts("gpu"):
            raise InvalidInput(
                f"{name!r} is a GPU, and a machine has a CPU and host memory too: write for "
                f"example {name.lower()}+epyc-9354+384GB"
            )
        if name.lower() not in catalogue():
            raise InvalidInput(
                f"{name!r} is no machine of the catalogue: it has {', '.join(catalogue())}; "
                f"parts of it go together as GPU+CPU+MEMORY, such as rtx-4090+epyc-9354+384GB; "
                f"a file of your own goes to HardwareSpec.from_yaml, and this machine is "
                f"HardwareSpec.detect()"
            )
        return cls.from_yaml(CATALOGUE / f"{name.lower()}.yaml")

    @classmethod
    def compose(
        cls, gpu: str, cpu: str, memory: str, link: str | None = None, **given: Any
    ) -> HardwareSpec:
        """A machine put together from parts of the catalogue.

        Parameters
        ----------
        gpu, cpu : str
            Such as "rtx-4090" and "epyc-9354"; :func:`~moegen.graph.hardware_parts.parts` lists
            them.
        memory : str
            Its size, and its kind and channels if they are not the fastest and the most that the
            CPU takes: "384GB", "384GB ddr5-4800 x12".
        link : str, optional
            Such as "pcie4-x16"; the fastest that both GPU and CPU have, unless given.
        **given
            Fields known better than the parts say, ``name`` too. What follows from them does:
            ``h2d_bytes_per_s`` for instance makes ``d2h_bytes_per_s``, unless that is given.

        Raises
        ------
        InvalidInput
            If a part is not in the catalogue, parts do not go together, or a field is wrong.

        Examples
        --------
        >>> hw = HardwareSpec.compose("rtx-4090", "epyc-9354", "384GB")
        >>> print(f"{hw.h2d_bytes_per_s / 1e9:.0f} GB/s: {hw.kind('h2d_bytes_per_s')}")
        25 GB/s: assumed
        """
        chosen = {"gpu": gpu, "cpu": cpu, "memory": memory, "link": link}
        return cls._of_parts(chosen, given, dict.fromkeys(given, "set by the caller"))

    @classmethod
    def _of_parts(
        cls, parts: Any, given: dict[str, Any], given_source: dict[str, str]
    ) -> HardwareSpec:
        keys = {"gpu", "cpu", "memory", "link"}
        if not isinstance(parts, dict) or not {"gpu", "cpu", "memory"} <= parts.keys() <= keys:
            raise InvalidInput(f"parts must name gpu, cpu, memory, and if need be link: {parts!r}")
        _check_keys(given, set())
        checked = {key: _checked(key, value) for key, value in given.items()}
        values, source = hardware_parts.compose(**parts, given=checked)
        return cls(**values, source=source | given_source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> HardwareSpec:
        """From a file of ``field: {value: ..., source: ...}``, or ``field: value``, in SI units.

        With ``parts: {gpu: ..., cpu: ..., memory: ..., link: ...}``, as :meth:`compose` takes
        them, only what is known better than the parts say need be there.

        Raises
        ------
        InvalidInput
            If the file cannot be read, or a key is unknown, missing or out of range.
        """
        data = read_yaml(path)
        stated = f"stated in {Path(path).name}"
        parts = data.pop("parts", None)
        values, source = with_sources(data, stated, path)
        try:
            if parts is not None:
                return cls._of_parts(parts, values, source)
            _check_keys(values, _required())
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

        New rates of the link are another link's, whose peak is not known unless it is given:
        ``link_peak_bytes_per_s`` then becomes None.

        Raises
        ------
        InvalidInput
            If a field is unknown, or its value is not a finite positive number.
        """
        _check_keys(changes, set())
        if not changes.keys().isdisjoint(_OF_THE_LINK):
            changes = {"link_peak_bytes_per_s": None} | changes
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
        """The inverse of :meth:`to_dict`; what may be left out of a YAML file may be here too.

        Raises
        ------
        InvalidInput
            If a key is unknown, missing or out of range.
        """
        _check_keys({k: v for k, v in data.items() if k != "source"}, _required())
        return cls(**data)

    def kind(self, field: str) -> str:
        """The kind of source that a field has, in a word or two: how far to trust it.

        Returns
        -------
        str
            "measured", "data sheet", "implied by the paper" (worked back from the throughputs
            that MoE-Gen published), "the paper" (said there), "assumed", "read from the system",
            "set by the caller", "stated" (by the author of a YAML file), or "no source".

        Raises
        ------
        InvalidInput
            If there is no such field.
        """
        if field not in field_names():
            raise InvalidInput(f"no such field: {field!r}; fields are {', '.join(field_names())}")
        return hardware_text.kind(self.source.get(field, ""))

    @property
    def rates(self) -> dict[str, str]:
        """What predictions rest on: each field that has a value, and what to call it."""
        return hardware_text.rates(self)

    def explain(self) -> str:
        """Each field's value with its source in full, a line each."""
        return hardware_text.explained(self)

    def __str__(self) -> str:
        return hardware_text.shown(self)


def field_names() -> list[str]:
    """The fields that a YAML file or ``with_`` may set."""
    return [f.name for f in dataclasses.fields(HardwareSpec) if f.name != "source"]


def _required() -> set[str]:
    fields = dataclasses.fields(HardwareSpec)
    return {f.name for f in fields if f.default is dataclasses.MISSING} - {"source"}


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


def _checked(key: str, value: Any) -> Any:
    """A field's value as it is kept."""
    if key in _TEXT:
        if not isinstance(value, str) or not value:
            raise InvalidInput(f"{key} must be a name, got {value!r}")
        return value
    if key == "gpu_efficiency":
        return _curve(value)
    return None if value is None and key in _OPTIONAL else _positive(key, value)


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
