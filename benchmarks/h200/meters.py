"""What the scripts measure with: rates, host memory that is pinned, GPU memory that is taken."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import moegen as mg
from moegen.exec.pinning import Pins, host_buffer


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


def timed_s(launch: Callable[[], object], repeats: int = 9) -> float:
    """Median time on the GPU of one launch, queued behind another so that launching is hidden."""
    for _ in range(2):
        launch()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(600_000)  # cycles: longer than the host takes to launch
        begin.record()
        launch()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(spans)


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


def planned_pinned(ledger: mg.Ledger, kv_bytes: int) -> int:
    """Host bytes that a plan pins: weights, a KV store of ``kv_bytes``, and what lanes stage."""
    store = sum(line.bytes for line in ledger.host.lines if line.name == "KV store")
    return ledger.host.pinned_bytes - store + kv_bytes


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
    ledger: mg.Ledger, gpu: GpuPeak, pinned: Pinned, pinned_planned_bytes: int
) -> dict[str, Any]:
    """Predicted and measured memory of a point: the fields of its JSON."""
    return {
        "gpu_planned_bytes": ledger.gpu.total_bytes,
        "gpu_reserved_bytes": gpu.bytes(),
        "pinned_planned_bytes": pinned_planned_bytes,
        "pinned_registered_bytes": pinned.peak_bytes,
        "pinned_by_torch_bytes": pinned.of_torch(),
    }


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
        # Blocking: a thread that spins would take a core from the CPU's attention.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
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
