"""The quick profile: this machine's rates, measured in a few seconds and kept.

It is what the automatic plan weighs, and what predictions of a run on this machine start from.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import moegen
from moegen.cache import cache_folder
from moegen.errors import InvalidInput, MachineError
from moegen.exec import rates
from moegen.exec.decode_attention import attention_kind
from moegen.exec.engine import Engine
from moegen.exec.lanes import forget_gpu_memory, gpu_identity
from moegen.exec.pinning import locking_problem
from moegen.graph.build import build
from moegen.graph.detect import detect
from moegen.graph.files import read_json, write_json
from moegen.graph.hardware import CPU_LANES, HardwareSpec
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy

FORMAT = 7
# Not every machine has these.
OPTIONAL = {"duplex_bytes_per_s", "cpu_call_s", "gpu_call_s"}
#: What a profile holds; capacities and names are `detect`'s.
RATES = (
    "gpu_flops",
    "gpu_efficiency",
    "gpu_bytes_per_s",
    "launch_s",
    "task_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "duplex_bytes_per_s",
    "copy_latency_s",
    "zero_copy_bytes_per_s",
    "host_bytes_per_s",
    "cpu_attn_bytes_per_s",
    "cpu_attn_flops",
    "cpu_call_s",
    "gpu_call_s",
)
# A model whose step is nothing but its overhead.
_LEAST = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
_LEAST_STEPS = 64


def machine_profile(
    device: torch.device,
    dtype: torch.dtype,
    *,
    fresh: bool = False,
    notes: list[str] | None = None,
) -> HardwareSpec:
    """This machine with its rates measured: from the cache, else now.

    Capacities and names are those of :func:`~moegen.graph.detect.detect`. Each rate's source
    says what was measured, how and when:

    - ``gpu_flops``, ``gpu_efficiency``: a gated MLP over 1 to some thousand tokens; the best rate
      found, and the share of it that so many tokens reach.
    - ``gpu_bytes_per_s``: copies within GPU memory. On CPU lanes decode attention on the GPU
      lane, which is what draws on it there.
    - ``task_s``: what a task costs however small its work, from the executor's own run of a model
      of next to no size: its step over the number of its tasks. It holds the Python around the
      kernels and the waits between lanes.
    - ``launch_s``, ``copy_latency_s``: the least kernels and copies, one after the other.
    - ``h2d_bytes_per_s``, ``d2h_bytes_per_s``, ``duplex_bytes_per_s``: large copies, one
      direction at a time and both together. On CPU lanes copies within host memory, beside
      products, and no duplex limit.
    - ``zero_copy_bytes_per_s``: a gather of KV rows, as fetch_kv does it.
    - ``host_bytes_per_s``: all cores reading host memory; beside a GPU what they read and what the
      link carries meanwhile, together.
    - ``cpu_attn_bytes_per_s``: grouped-query decode attention over more KV than caches hold;
      ``cpu_attn_flops``: absorbed latent attention, which arithmetic binds.
    - ``cpu_call_s``, on CPU lanes ``gpu_call_s`` too: decode attention of many short rows of
      different lengths, what each more of them takes.

    CPU lanes share the cores and the caches: there a product is measured while the weights of
    the next are copied, and what goes on beside products beside them.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
        Of weights and KV.
    fresh : bool
        Measure now, and leave what the cache holds as it is.
    notes : list of str, optional
        Gets a line where the profile could not be kept.

    Notes
    -----
    A profile holds for one machine, device, dtype, number of torch's threads, kernel of the CPU's
    attention, memory that can be pinned or not, and version of torch and moegen; one that is
    damaged or of others is measured anew and replaced. Where the cache cannot be written it is
    measured each time.
    """
    here = detect()
    if device.type == "cpu":
        here = replace(here, gpu_name=CPU_LANES)
    if fresh:
        return _with_rates(here, _measure(device, dtype, here))
    key = _key(device, dtype, here)
    try:
        path = _path(key)
        kept = _read(path, key, here)
    except RuntimeError as e:  # there is no home directory
        path, kept = e, None
    if kept is not None:
        return kept
    found = _measure(device, dtype, here)
    problem = str(path) if isinstance(path, RuntimeError) else _write(path, key, found)
    if problem is not None and notes is not None:
        notes.append(
            f"this machine's rates were measured and could not be kept, so the next run measures "
            f"them again: {problem}"
        )
    return _with_rates(here, found)


def _key(device: torch.device, dtype: torch.dtype, here: HardwareSpec) -> dict[str, Any]:
    """What a profile holds for: plain data, equal for equal circumstances."""
    on_gpu = device.type == "cuda"
    return {
        "host": here.name,
        "cpu": here.cpu_name,
        "device": device.type,
        "gpu": gpu_identity(device) if on_gpu else None,
        "pinned": on_gpu and locking_problem(rates.LINK_BYTES) is None,
        "dtype": rates.dtype_name(dtype),
        "torch_threads": torch.get_num_threads(),
        "cpu_attention": attention_kind(),
        "torch": str(torch.__version__),
        "moegen": moegen.__version__,
        "format": FORMAT,
    }


def _path(key: dict[str, Any]) -> Path:
    """One file for all versions: those of old ones have no use."""
    place = {k: v for k, v in key.items() if k not in ("torch", "moegen", "format")}
    digest = hashlib.sha256(repr(sorted(place.items())).encode()).hexdigest()[:8]
    host = re.sub(r"[^\w.-]+", "-", key["host"])[:64]
    return cache_folder() / "profiles" / f"{host}-{key['device']}-{key['dtype']}-{digest}.json"


def _read(path: Path, key: dict[str, Any], here: HardwareSpec) -> HardwareSpec | None:
    """The profile in a file; None unless it is sound and of this key."""
    if not path.is_file():
        return None
    try:
        data = read_json(path, "the machine's profile")
        found = {k: (entry["value"], entry["source"]) for k, entry in data["rates"].items()}
        sound = data["key"] == key and set(RATES) - OPTIONAL <= found.keys() <= set(RATES)
        sound = sound and all(str(how).startswith("measured: ") for _, how in found.values())
        return _with_rates(here, found) if sound else None
    except (InvalidInput, LookupError, AttributeError, TypeError):
        return None


def _write(path: Path, key: dict[str, Any], found: rates.Found) -> str | None:
    """Keep a profile; what went wrong, or None."""
    kept = {k: {"value": value, "source": how} for k, (value, how) in found.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": key, "rates": kept}, "the machine's profile", indent=1)
    except (OSError, InvalidInput, MachineError) as e:
        return str(e)
    return None


def _with_rates(here: HardwareSpec, found: rates.Found) -> HardwareSpec:
    values = {k: value for k, (value, _) in found.items()}
    return replace(here, **values, source=here.source | {k: how for k, (_, how) in found.items()})


def _measure(device: torch.device, dtype: torch.dtype, here: HardwareSpec) -> rates.Found:
    try:
        if device.type == "cuda":
            found = rates.cuda_lanes(dtype, device) | host_code(device, dtype, here)
        else:
            found = rates.cpu_lanes(dtype) | host_code(device, dtype, here)
    except (torch.OutOfMemoryError, MemoryError) as e:
        raise MachineError(
            f"the rates of {device} cannot be measured: {e}. Free what holds its memory, or give "
            f"the rates yourself: hardware=HardwareSpec.from_yaml(...)"
        ) from e
    finally:
        if device.type == "cuda":
            forget_gpu_memory(device)
    date = time.strftime("%Y-%m-%d")
    return {k: (value, f"measured: {how} on {date}") for k, (value, how) in found.items()}


def host_code(device: torch.device, dtype: torch.dtype, here: HardwareSpec) -> rates.Found:
    """What the executor's own code takes, from runs of next to no work: a task, and a call."""
    model = ModelSpec.from_config(_LEAST | {"dtype": rates.dtype_name(dtype)}, "overhead")
    few = Strategy(B=4, b_a=1, b_e=64, s_expert=4 * model.expert_bytes, omega=0.5)
    with Engine.random(
        model, few, device=str(device), dtype=rates.dtype_name(dtype), hardware=here
    ) as engine:
        g = build(engine.model, few, "decode", kv_len=16)
        tl = engine.execute(g, steps=_LEAST_STEPS)
        machinery = engine.machinery
        call = rates.short_row(machinery.family.decode_shape(0), dtype, machinery.decode)
    ends = [float(t) for t in tl.step_end_s]
    # The least: with so many waits between threads, another process disturbs most steps.
    period_s = min(b - a for a, b in itertools.pairwise(ends))
    tiny = f"a model of {model.n_layers} layers {model.hidden} wide"
    how = f"the fastest of {_LEAST_STEPS} steps of {tiny}, over its {len(g)} tasks,"
    found: rates.Found = {"task_s": (period_s / len(g), how)}
    if call is not None:
        found["cpu_call_s"] = call
        # On CUDA one kernel takes all rows of the GPU.
        if device.type == "cpu":
            found["gpu_call_s"] = call
    return found
