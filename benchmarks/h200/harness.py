"""What the scripts beside this file share: a model and a machine by flags, results that survive.

Every script writes its JSON anew after each point, so that one that is stopped keeps what it had,
and looks at its own time budget before it begins another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import moegen as mg
from moegen.exec.pinning import Pins, host_buffer
from moegen.graph.sound import GPU_SHARE
from moegen.timeline import Timeline
from moegen.units import GIB, parse_bytes

TINY = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
# Wide enough that buffers, not rounding, are what memory goes to at 1 or 2 GiB.
SMALL = TINY | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "num_hidden_layers": 8,
}
LATENT = {
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_layer_freq": 1,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
SMALL_LATENT = LATENT | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 32000,
    "n_routed_experts": 32,
}
_MADE_UP = {
    "tiny": TINY,
    "small": SMALL,
    "tiny-latent": LATENT,
    "small-latent": SMALL_LATENT,
}
_BEGAN = time.perf_counter()


def parser(doc: str | None, *, budget_s: float) -> argparse.ArgumentParser:
    """Flags that all scripts have; ``doc`` is the script's docstring."""
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("out", type=Path, help="the JSON file to write")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument(
        "--model", default="mixtral-8x7b", help=f"of the catalogue, or one of {', '.join(_MADE_UP)}"
    )
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--gpu-memory", type=parse_bytes, default=24 * GIB)
    p.add_argument("--host-memory", type=parse_bytes, help="what the machine may give, if not all")
    p.add_argument("--budget-s", type=float, default=budget_s, help="begin nothing after that")
    return p


def model_of(args: argparse.Namespace) -> tuple[mg.ModelSpec, mg.ModelSpec]:
    """The layers to run, and the whole model that they are part of."""
    whole = spec_of(args.model)
    return whole.with_(n_layers=args.layers), whole


def spec_of(name: str) -> mg.ModelSpec:
    """A model of the catalogue, or a made-up one, in bf16."""
    if name in _MADE_UP:
        return mg.ModelSpec.from_config(_MADE_UP[name], name)
    return mg.ModelSpec.from_pretrained(name).with_(dtype="bfloat16")


def engine_of(args: argparse.Namespace, model: mg.ModelSpec, plan: Any = "auto") -> mg.Engine:
    """Random weights on the device, with GPU memory held to the cap."""
    cap_gpu(args)
    return mg.Engine.random(
        model,
        plan,
        device=args.device,
        gpu_memory_bytes=args.gpu_memory,
        host_memory_bytes=args.host_memory,
        hardware=mg.HardwareSpec.from_name("h200"),
    )


def kept_bytes(engine: mg.Engine, whole: mg.ModelSpec, s: mg.Strategy, work: mg.Workload) -> int:
    """S_Params with which these layers keep the share that all of the model's could keep.

    Else a few layers would lie on the GPU whole, and nothing would be copied.
    """
    part, hw = engine.model, engine.prepared.capacities
    hw = hw.with_(gpu_memory_bytes=hw.gpu_memory_bytes * GPU_SHARE)
    here, all_ = (m.weight_bytes - m.head_bytes for m in (part, whole))

    def ledger(s_params: int) -> mg.Ledger:
        return mg.memory(part, hw, s.with_(s_params=s_params), work)

    kept = max(0, min(ledger(0).gpu.free_bytes, all_)) * here // all_
    # What is kept takes a little more as packed than its weights: take that back.
    while kept and (over := -ledger(kept).gpu.free_bytes) > 0:
        kept = max(0, kept - over)
    return kept


def cap_gpu(args: argparse.Namespace) -> None:
    """Let the allocator have ``--gpu-memory`` and no byte more."""
    if args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory / total))


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    cuda = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "none: CPU lanes",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


class Results:
    """A JSON file that is whole after every point.

    Parameters
    ----------
    args : Namespace
        Of :func:`parser`.
    **head
        What is known from the beginning.
    """

    def __init__(self, args: argparse.Namespace, **head: Any) -> None:
        self.path, self.device = args.out, args.device
        self._deadline = time.perf_counter() + args.budget_s
        self.data: dict[str, Any] = {"machine": machine(args.device), "complete": False, **head}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._deadline - time.perf_counter()

    def put(self, **values: Any) -> None:
        """Set values and write the file."""
        self.data |= values
        self.save()

    def add(self, point: dict[str, Any], to: str = "points") -> None:
        """Append a point and write the file."""
        self.data.setdefault(to, []).append(point)
        self.save()

    def save(self) -> None:
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self.path)

    def within(self, what: Iterable[Any], each_s: float) -> Iterator[Any]:
        """As many of ``what`` as the budget allows, when one takes ``each_s`` at first guess."""
        for item in what:
            if self.left_s < each_s:
                say(f"no time left for {item}")
                self.data.setdefault("left_out", []).append(str(item))
                self.save()
                continue
            began = time.perf_counter()
            yield item
            each_s = max(each_s, time.perf_counter() - began)

    def done(self) -> None:
        self.put(complete="left_out" not in self.data and "failed" not in self.data)
        say(f"wrote {self.path}")


def say(*words: object) -> None:
    """Print at once, with the seconds since the script began."""
    print(f"[{time.perf_counter() - _BEGAN:6.1f}s]", *words, flush=True)
    sys.stdout.flush()


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def median_s(fn: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``fn``, after one warm-up."""
    fn()
    times = []
    for _ in range(repeats):
        t = time.perf_counter()
        fn()
        times.append(time.perf_counter() - t)
    return statistics.median(times)


def matmul_flops(device: str, m: int, k: int, n: int) -> float:
    """FLOP/s of a bf16 product [m, k] x [k, n], random numbers."""
    a = torch.randn(m, k, device=device).bfloat16()
    b = torch.randn(k, n, device=device).bfloat16()
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)
        settle(device)

    return 10 * 2 * m * k * n / median_s(products)


class Pinned:
    """Counts host memory that is registered or allocated as pinned while the context is open."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self.seconds = 0.0

    def __enter__(self) -> Pinned:
        self._originals = Pins.register, Pins.unregister
        register, unregister = self._originals
        held: weakref.WeakKeyDictionary[Pins, int] = weakref.WeakKeyDictionary()

        def counted(pins: Pins, buffers: Sequence[torch.Tensor]) -> str | None:
            t = time.perf_counter()
            problem = register(pins, buffers)
            self.seconds += time.perf_counter() - t
            if problem is None:
                held[pins] = sum(b.nbytes for b in buffers)
                self.now_bytes = sum(held.values())
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            return problem

        def uncounted(pins: Pins) -> None:
            unregister(pins)
            held.pop(pins, None)
            self.now_bytes = sum(held.values())

        Pins.register, Pins.unregister = counted, uncounted
        return self

    def __exit__(self, *exc: object) -> None:
        Pins.register, Pins.unregister = self._originals

    def reset_peak(self) -> None:
        """Count the peak anew, torch's own allocator's included."""
        self.peak_bytes = self.now_bytes
        if torch.cuda.is_available():
            torch.cuda.host_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()

    def of_torch(self) -> int:
        """The most bytes that torch's allocator of pinned memory has handed out at once."""
        if not torch.cuda.is_available():
            return 0
        return int(torch.cuda.host_memory_stats().get("active_bytes.peak", 0))


# Lines of a ledger's host section that are pinned whole, beside the KV store; of the row table half
# is.
PINNED_LINES = ("weights", "weights as packed", "queries and outputs staged")


def planned_pinned(ledger: mg.Ledger, kv_bytes: int | None = None) -> int:
    """Host bytes that a plan pins: weights, the KV store and what lanes stage."""
    lines = {line.name: line.bytes for line in ledger.host.lines}
    store = lines.get("KV store", 0) if kv_bytes is None else kv_bytes
    return sum(lines.get(x, 0) for x in PINNED_LINES) + store + lines.get("row table", 0) // 2


class GpuPeak:
    """What the allocator took from the GPU since the last reset, and what it was to take."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            # A workspace that a product of this script left behind is not the engine's.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved() if self.cuda else None


def memory_point(
    ledger: mg.Ledger,
    gpu: GpuPeak,
    pinned: Pinned,
    host: mg.Ledger | None = None,
    kv_bytes: int | None = None,
) -> dict[str, Any]:
    """Predicted and measured memory of a point: the fields of its JSON.

    ``host`` is the ledger of host memory if that is another one, ``kv_bytes`` what the KV store
    was asked to hold if the ledger has it larger.
    """
    return {
        "gpu_planned_bytes": ledger.gpu.total_bytes,
        "gpu_reserved_bytes": gpu.bytes(),
        "pinned_planned_bytes": planned_pinned(host or ledger, kv_bytes),
        "pinned_registered_bytes": pinned.peak_bytes,
        "pinned_by_torch_bytes": pinned.of_torch(),
    }


def steps_s(tl: Timeline) -> list[float]:
    """Time from the end of each step to that of the next."""
    ends = tl.step_end_s.tolist()
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def lane_shares(tl: Timeline) -> dict[str, float]:
    """How busy each lane was in the window that the period is over."""
    begin, end = tl.counted_window_s
    return {
        lane.value: sum(b - a for a, b in tl.spans_s(members, begin, end)) / (end - begin)
        for lane, members in tl.by_lane.items()
    }


def median_task_s(tl: Timeline) -> dict[str, float]:
    """Median duration of each op's tasks."""
    return tl.to_frame().groupby("op")["duration_s"].median().to_dict()


def pinned_buffer(nbytes: int, device: str) -> tuple[torch.Tensor, Pins]:
    """Host memory full of numbers, registered where there is a GPU."""
    data = host_buffer(nbytes, huge=device == "cuda")
    data.fill_(1)
    pins = Pins()
    if device == "cuda":
        problem = pins.register([data])
        if problem is not None:
            raise SystemExit(f"pinning failed: {problem}")
    return data, pins


class Link:
    """Copies of weights to the device over and over, as the BULK lane makes them."""

    def __init__(self, engine: mg.Engine) -> None:
        self.device = engine.device.type
        experts = [t for t in engine.weights.experts if t is not None]
        self._blobs = [blob for layer in experts for blob in layer]
        self._slots = [torch.empty_like(self._blobs[0], device=engine.device) for _ in range(2)]
        self._stream = torch.cuda.Stream() if self.device == "cuda" else None
        self._n = 0

    @property
    def nbytes(self) -> int:
        """Of one copy."""
        return self._slots[0].nbytes

    def copy(self) -> Any:
        """One more copy queued; returns what says when it is done."""
        src = self._blobs[self._n % len(self._blobs)]
        self._n += 1
        if self._stream is None:
            self._slots[0].copy_(src)
            return None
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            self._slots[self._n % 2].copy_(src, non_blocking=True)
            event.record()
        return event

    def alone(self, n: int = 48) -> float:
        """Bytes per second of ``n`` copies with nothing beside them."""
        first = self.copy()
        if first is not None:
            first.synchronize()
        t = time.perf_counter()
        events = [self.copy() for _ in range(n)]
        if events[-1] is not None:
            events[-1].synchronize()
        return n * self.nbytes / (time.perf_counter() - t)

    @contextmanager
    def busy(self) -> Iterator[list[float]]:
        """Copies all the while; afterwards the list holds their bytes per second."""
        over, rate, done, begun = threading.Event(), [], [], threading.Event()

        def feed() -> None:
            ahead: list[Any] = []
            while not over.is_set():
                ahead.append(self.copy())
                if len(ahead) > 3:
                    oldest = ahead.pop(0)
                    if oldest is not None:
                        oldest.synchronize()
                    done.append(time.perf_counter())
                    begun.set()
            if ahead[-1] is not None:
                ahead[-1].synchronize()

        thread = threading.Thread(target=feed)
        thread.start()
        begun.wait()
        try:
            yield rate
        finally:
            over.set()
            thread.join()
        if len(done) > 2:
            rate.append((len(done) - 1) * self.nbytes / (done[-1] - done[0]))
