"""Machines put together from parts: a GPU, a CPU, its memory, and the link between them.

The parts are in ``data/hardware/parts``. What no data sheet says is derived here, openly: each
constant below is a share or a rate measured on one machine and assumed for the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moegen.errors import InvalidInput
from moegen.graph.hardware_files import read_yaml, with_sources
from moegen.units import parse_bytes

Kind = Literal["gpu", "cpu", "memory", "link"]
Values = dict[str, Any]
Sources = dict[str, str]

_FILES = {"gpu": "gpus", "cpu": "cpus", "memory": "memory", "link": "links"}
_CALLED = {"gpu": "GPU", "cpu": "CPU", "memory": "kind of memory", "link": "link"}

# Measured on one H200 machine: 44.0 of 55.0 GB/s, 50 of 55.0, 98 of 120, and 98 by 16 threads.
_DUPLEX_SHARE, _ZERO_COPY_SHARE, _ATTENTION_SHARE, _ATTENTION_OF_A_CORE = 0.8, 0.9, 0.8, 6e9
_LAUNCH_S, _COPY_LATENCY_S, _COPY_FLOOR_S = 1e-5, 1.4e-5, 2.3e-5
# Measured on an H200: the share of its peak that a product over so many tokens reaches. A GPU that
# does fewer FLOP for each byte it reads gets there with fewer tokens.
_H200_CURVE = ((1, 0.00255), (64, 0.163), (256, 0.457), (1024, 0.680), (4096, 0.735))
_H200_FLOP_PER_BYTE = 989e12 / 4.8e12


@dataclass(frozen=True)
class Part:
    """One part of the catalogue: its fields, and where each value comes from."""

    kind: Kind
    name: str
    values: Values
    source: Sources

    def get(self, field: str) -> Any:
        """The value of a field, None if it is not given."""
        return self.values.get(field)


@cache
def _read(kind: Kind) -> tuple[dict[str, Part], dict[str, str]]:
    """The parts of a kind by name, and those that are refused with the reason."""
    path = Path(__file__).parent.parent / "data" / "hardware" / "parts" / f"{_FILES[kind]}.yaml"
    data = read_yaml(path)
    found = {
        name: Part(kind, name, *with_sources(fields, data["source"], path))
        for name, fields in data["parts"].items()
    }
    return found, data.get("refused", {})


def parts(kind: Kind) -> list[str]:
    """Names of the catalogue's parts of one kind: "gpu", "cpu", "memory" or "link"."""
    if kind not in _FILES:
        raise InvalidInput(f"a kind of part is one of {', '.join(_FILES)}, got {kind!r}")
    return list(_read(kind)[0])


def part(kind: Kind, name: str) -> Part:
    """A part of the catalogue.

    Raises
    ------
    InvalidInput
        If the catalogue has no such part, or refuses it, with what it has.
    """
    known, refused = _read(kind)
    key = "-".join(str(name).lower().split())
    if key in known:
        return known[key]
    if key in refused:
        raise InvalidInput(f"{name!r} cannot be used: {refused[key]}")
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}? It has " if near else "it has "
    raise InvalidInput(
        f"{name!r} is no {_CALLED[kind]} of the catalogue: {hint}{', '.join(known)}; "
        f"numbers of your own go into a YAML file"
    )


def by_driver_name(name: str) -> Part | None:
    """The GPU that a driver calls ``name``, such as "NVIDIA A100-SXM4-80GB"; None if unknown."""
    words = set(name.replace("-", " ").split())
    fits = [p for p in _read("gpu")[0].values() if words >= set(p.values["nvml"].split())]
    return max(fits, key=lambda p: len(p.values["nvml"].split()), default=None)


def split(text: str) -> dict[str, str]:
    """The arguments of :func:`compose` in ``"GPU+CPU+MEMORY"`` or ``"GPU+CPU+MEMORY+LINK"``."""
    words = [word.strip() for word in text.split("+")]
    if len(words) not in (3, 4) or not all(words):
        raise InvalidInput(
            f"{text!r} names no machine by its parts: write GPU+CPU+MEMORY or GPU+CPU+MEMORY+LINK, "
            f"such as rtx-4090+epyc-9354+384GB or l40s+xeon-8480+1TB+pcie4-x8"
        )
    return dict(zip(_FILES, words, strict=False))


def compose(
    gpu: str,
    cpu: str,
    memory: str,
    link: str | None = None,
    *,
    given: Mapping[str, Any] | None = None,
) -> tuple[Values, Sources]:
    """The fields of a machine made of parts, and their sources.

    Parameters
    ----------
    memory : str
        A size, and if they are not the CPU's fastest and most, a kind and a number of channels:
        "384GB", "384GB ddr5-4800 x12".
    link : str, optional
        The fastest that both the GPU and the CPU have, unless given.
    given : mapping
        Fields known better. What is derived from them follows.

    Raises
    ------
    InvalidInput
        If a part is not known, or parts do not go together.
    """
    the_gpu, the_cpu = part("gpu", gpu), part("cpu", cpu)
    memory = str(memory)  # YAML has plain numbers too
    size, kind, channels = _memory(memory, the_cpu)
    the_link = _link(link, the_gpu, the_cpu)
    chosen = [] if link is None else [the_link.name]
    values: Values = {
        "name": "+".join([the_gpu.name, the_cpu.name, memory.replace(" ", "-"), *chosen]),
        "cpu_name": f"{the_cpu.get('cpu_name')}, {the_cpu.get('cores')} cores",
        "host_memory_bytes": size,
        "gpu_efficiency": _efficiency(the_gpu),
        "launch_s": _LAUNCH_S,
        "copy_latency_s": _COPY_LATENCY_S,
        "copy_floor_s": _COPY_FLOOR_S,
    }
    source: Sources = {
        "name": "the names of its parts",
        "cpu_name": "a name",
        "host_memory_bytes": f"stated: {memory}",
        "gpu_efficiency": (
            "assumed: the curve measured on an H200, its tokens by FLOP for each byte of GPU memory"
        ),
        "launch_s": "assumed: 10 us a kernel",
        "copy_latency_s": "assumed: as measured on an H200 machine",
        "copy_floor_s": "assumed: as measured on an H200 machine",
    }
    for x in (the_gpu, the_link):
        fields = [k for k in x.values if k not in ("nvml", "link", "price_usd", "power_w")]
        values |= {key: x.values[key] for key in fields}
        source |= {key: x.source[key] for key in fields}
    for key, (value, how) in _bill(the_gpu, the_cpu, kind, size).items():
        values[key], source[key] = value, how
    values |= given or {}
    for key, (value, how) in _derived(values, the_cpu, kind, channels).items():
        if key not in values:
            values[key], source[key] = value, how
    return values, source


def _memory(text: str, cpu: Part) -> tuple[int, Part, int]:
    """Size in bytes, kind and channels of memory beside a CPU."""
    channels, kind, size = cpu.values["channels"], cpu.values["memory"], []
    for word in text.lower().split():
        if word[0] == "x" and word[1:].isdigit():
            channels = int(word[1:])
        elif "-" in word or word in parts("memory"):
            kind = word
        else:
            size.append(word)
    capacity, most = parse_bytes(" ".join(size)), cpu.values["memory_most_bytes"]
    found = part("memory", kind)
    if not 1 <= channels <= cpu.values["channels"]:
        raise InvalidInput(
            f"memory {text!r}: {cpu.name} has {cpu.values['channels']} channels, not {channels}"
        )
    fastest = part("memory", cpu.values["memory"])
    generation = fastest.name.partition("-")[0]
    if found.name.partition("-")[0] != generation:
        raise InvalidInput(f"memory {text!r}: {cpu.name} takes {generation}, not {found.name}")
    if found.values["channel_bytes_per_s"] > fastest.values["channel_bytes_per_s"]:
        raise InvalidInput(
            f"memory {text!r}: {cpu.name} takes at most {fastest.name}. If it runs faster in "
            f"yours, give host_bytes_per_s"
        )
    if capacity > 1.1 * most:  # sizes may be meant in powers of two
        raise InvalidInput(
            f"memory {text!r}: {cpu.name} takes at most {most / 1e9:.0f} GB, "
            f"{(capacity - most) / 1e9:.0f} GB less. Take a CPU with more"
        )
    return capacity, found, channels


def _link(name: str | None, gpu: Part, cpu: Part) -> Part:
    """The link between two parts; the slower one's fastest unless named."""
    ends = [part("link", end.values["link"]) for end in (gpu, cpu)]
    pcie = [end.name.startswith("pcie") for end in ends]
    if pcie[0] != pcie[1]:
        raise InvalidInput(
            f"{gpu.name} goes with a CPU that has {ends[0].name}, and {cpu.name} has {ends[1].name}"
        )
    if name is None:
        return min(ends, key=_peak)
    link = part("link", name)
    for end, at_most in zip((gpu, cpu), ends, strict=True):
        if link.name.partition("-")[0][:4] != at_most.name[:4] or _too_fast(link, at_most):
            raise InvalidInput(
                f"link {link.name}: {end.name} has {at_most.name}. For a link that no part has, "
                f"give its rates: h2d_bytes_per_s, link_peak_bytes_per_s"
            )
    return link


def _peak(link: Part) -> float:
    return link.values["link_peak_bytes_per_s"]


def _too_fast(link: Part, limit: Part) -> bool:
    """Whether a link has a later generation or more lanes than another: both count."""
    if not link.name.startswith("pcie"):
        return _peak(link) > _peak(limit)
    (gen, lanes), (most_gen, most_lanes) = (
        x.name.removeprefix("pcie").split("-x") for x in (link, limit)
    )
    return int(gen) > int(most_gen) or int(lanes) > int(most_lanes)


def _efficiency(gpu: Part) -> Any:
    scale = gpu.values["gpu_flops"] / gpu.values["gpu_bytes_per_s"] / _H200_FLOP_PER_BYTE
    return [[float(f"{tokens * scale:.4g}"), share] for tokens, share in _H200_CURVE]


def _bill(gpu: Part, cpu: Part, memory: Part, size: int) -> dict[str, tuple[float, str]]:
    """Price and power: GPU, CPU and memory, as in MoE-Gen's table 5."""
    bill = {}
    for key, of_memory in (("price_usd", "usd_per_gb"), ("power_w", "w_per_gb")):
        amounts = (gpu.get(key), cpu.get(key), memory.get(of_memory) * size / 1e9)
        if None not in amounts:
            how = (
                f"GPU {amounts[0]:.0f} ({gpu.source[key]}), CPU {amounts[1]:.0f} "
                f"({cpu.source[key]}), memory {amounts[2]:.0f} ({memory.source[of_memory]})"
            )
            bill[key] = (round(sum(amounts), 1), f"assumed: {how}; nothing for the rest")
    return bill


def _derived(
    values: Values, cpu: Part, memory: Part, channels: int
) -> dict[str, tuple[float, str]]:
    """What no data sheet says, from what is known so far and given."""
    h2d = float(values["h2d_bytes_per_s"])
    cores, share = cpu.values["cores"], cpu.values["attn_share"]
    peak = channels * memory.values["channel_bytes_per_s"]
    over = f"{channels} channels of {memory.name}" if channels > 1 else memory.name
    if "cpu_flops" in cpu.values:
        cpu_flops, flops_how = cpu.values["cpu_flops"], cpu.source["cpu_flops"]
    else:
        clock_ghz, each = cpu.values["clock_ghz"], cpu.values["flops_per_cycle"]
        cpu_flops = cores * clock_ghz * 1e9 * each
        flops_how = f"data sheet: {cores} cores x {clock_ghz} GHz x {each} float32 FLOP a cycle"
    host_share = memory.values["host_share"]
    host = float(values.get("host_bytes_per_s", host_share * peak))
    by_memory, by_cores = _ATTENTION_SHARE * host, _ATTENTION_OF_A_CORE * cores
    attention_how = (
        f"{_ATTENTION_SHARE:.0%} of host memory's rate (measured on an H200 machine: 98 of 120)"
        if by_memory <= by_cores
        else f"{_ATTENTION_OF_A_CORE / 1e9:g} GB/s a core (measured on an H200 machine: 98 by 16)"
    )
    return {
        "d2h_bytes_per_s": (h2d, "assumed: as host to device"),
        "duplex_bytes_per_s": (
            _DUPLEX_SHARE * h2d,
            f"assumed: {_DUPLEX_SHARE:.0%} of one direction, as measured on an H200 machine",
        ),
        "zero_copy_bytes_per_s": (
            _ZERO_COPY_SHARE * h2d,
            f"assumed: {_ZERO_COPY_SHARE:.0%} of the link, as measured on an H200 machine",
        ),
        "host_bytes_per_s": (
            host,
            f"assumed: {host_share:.0%} of the {peak / 1e9:.1f} GB/s of {over} "
            f"({memory.source['host_share'].removeprefix('assumed: ')})",
        ),
        "cpu_attn_bytes_per_s": (min(by_memory, by_cores), f"assumed: {attention_how}"),
        "cpu_attn_flops": (
            share * cpu_flops,
            f"assumed: {share:g} of {cpu_flops / 1e12:.4g} TFLOP/s ({flops_how}), for bf16 KV "
            + ("widened to float32 on the way" if share < 0.5 else "which the CPU multiplies"),
        ),
    }
