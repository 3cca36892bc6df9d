"""The CPU's decode attention: in C++ where a compiler is found, else in torch.

One object holds its threads and is used by every layer of a run. It reads each row's history
where it lies in the KV store and writes the new token's KV there first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from moegen.errors import InvalidInput, MachineError
from moegen.exec import attention
from moegen.exec.attention import DecodeShape
from moegen.exec.kernels import cpu_attention
from moegen.exec.lanes import own_torch_threads, use_torch_threads

#: Takes a variant by name: "torch", or one of the compiled ones ("AVX2", "portable").
VARIABLE = "MOEGEN_CPU_ATTENTION"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# What a row costs beside its tokens, in tokens: keeps one thread from getting all short rows.
_ROW_OVERHEAD_TOKENS = 16
# KV that a thread more is worth waking for: with less, threads wait for each other's Python.
_THREAD_BYTES = 1024 * 1024


class CpuDecode(ABC):
    """Decode attention on ``threads`` threads; any thread may call it.

    Attributes
    ----------
    threads : int
    kind : str
        What computes: "C++ AVX-512", for example, or "torch".
    note : str or None
        What a person should know: why it is not the fast one.
    """

    threads: int
    kind: str
    note: str | None = None

    @abstractmethod
    def attend(
        self,
        shape: DecodeShape,
        q: Tensor,
        new_kv: Tensor,
        store: Tensor,
        start: np.ndarray,
        length: np.ndarray,
        out: Tensor,
    ) -> None:
        """Write each row's new KV to the store, then attend over the row.

        Parameters
        ----------
        shape : DecodeShape
        q : Tensor, [R, n_heads * dk]
        new_kv : Tensor, [R, kv_width]
            Goes to token ``start + length - 1`` of the store.
        store : Tensor, [tokens, kv_width]
        start, length : int64 arrays, [R]
            Row r owns tokens ``[start[r], start[r] + length[r])``, the new one included; rows
            own no token together.
        out : Tensor, [R, n_heads * dv]
            Written. All tensors are of one dtype, on the CPU, their rows contiguous.
        """

    @abstractmethod
    def read(self, data: Tensor) -> None:
        """Read memory with all threads, in order: the speed that attention is held against."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads."""


class CompiledDecode(CpuDecode):
    """The kernel of ``kernels/cpu_attention.cpp``.

    Its threads sleep between calls and keep off the first of the process's cores where there
    are fewer of them than cores. Of two calls at once the second waits, unless there is only
    one thread: then each is the caller's own. A fork starts threads of its own.

    Parameters
    ----------
    library : Library
    variant : str
    threads : int
    """

    def __init__(self, library: cpu_attention.Library, variant: str, threads: int) -> None:
        self.threads, self.kind = threads, f"C++ {variant}"
        self._functions = library.functions
        self._handle: int | None = self._functions.moegen_open(library.variants[variant], threads)

    def attend(
        self,
        shape: DecodeShape,
        q: Tensor,
        new_kv: Tensor,
        store: Tensor,
        start: np.ndarray,
        length: np.ndarray,
        out: Tensor,
    ) -> None:
        start, length = _checked(shape, q, new_kv, store, start, length, out)
        s = shape.sinks
        failed = self._functions.moegen_decode(
            self._open(),
            _DTYPES[q.dtype],
            len(start),
            start.ctypes.data,
            length.ctypes.data,
            *(q.data_ptr(), q.stride(0), new_kv.data_ptr(), new_kv.stride(0)),
            *(store.data_ptr(), store.stride(0), out.data_ptr(), out.stride(0)),
            *(shape.n_heads, shape.n_kv_heads, shape.dk, shape.dv, int(shape.latent)),
            *(shape.scale, shape.window or 0, None if s is None else s.data_ptr()),
        )
        _require(failed)

    def read(self, data: Tensor) -> None:
        check = ctypes.c_uint64()
        _require(
            self._functions.moegen_read(
                self._open(), data.data_ptr(), data.nbytes, ctypes.byref(check)
            )
        )

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._functions.moegen_close(handle)

    def _open(self) -> int:
        if self._handle is None:
            raise MachineError("the CPU's attention was used after it was closed")
        return self._handle


class TorchDecode(CpuDecode):
    """torch's products, with the rows split over threads that use one torch thread each.

    Each thread gets neighbouring rows with about the same number of tokens; a row's result
    does not depend on the split.

    Parameters
    ----------
    threads : int
    note : str, optional
    """

    kind = "torch"

    def __init__(self, threads: int, note: str | None = None) -> None:
        self.threads, self.note = threads, note
        self._pool = _pool(threads) if threads > 1 else None

    def attend(
        self,
        shape: DecodeShape,
        q: Tensor,
        new_kv: Tensor,
        store: Tensor,
        start: np.ndarray,
        length: np.ndarray,
        out: Tensor,
    ) -> None:
        start, length = _checked(shape, q, new_kv, store, start, length, out)
        store.index_copy_(0, torch.from_numpy(start + length - 1), new_kv)
        seen = length if shape.window is None else np.minimum(length, shape.window)
        first = (start + length - seen).tolist()
        views = [store[a : a + n] for a, n in zip(first, seen.tolist(), strict=True)]
        threads = min(self.threads, 1 + int(seen.sum()) * store[:1].nbytes // _THREAD_BYTES)
        if self._pool is None or threads <= 1 or len(views) <= 1:
            out.copy_(attention.decode(shape, q, views))
            return
        bounds = _balanced([n + _ROW_OVERHEAD_TOKENS for n in seen.tolist()], threads)

        def part(a: int, b: int) -> None:
            # Gradient mode belongs to a thread: the caller's does not reach the pool.
            with torch.inference_mode():
                out[a:b].copy_(attention.decode(shape, q[a:b], views[a:b]))

        parts = [
            self._pool.submit(part, a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a
        ]
        for done in parts:
            done.result()

    def read(self, data: Tensor) -> None:
        words = data.flatten().view(torch.float32)
        if self._pool is None:
            words.sum()
        else:
            list(self._pool.map(torch.sum, words.chunk(self.threads)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def cpu_decode(threads: int, kind: str | None = None) -> CpuDecode:
    """The fastest decode attention that this machine has.

    Parameters
    ----------
    threads : int
    kind : str, optional
        "torch" or a compiled variant by name; `VARIABLE` decides unless given, else the machine.

    Raises
    ------
    InvalidInput
        If there is no such variant on this machine.
    """
    kind = kind or os.environ.get(VARIABLE) or None
    if kind == "torch":
        return TorchDecode(threads)
    try:
        library = cpu_attention.library()
    except cpu_attention.Unavailable as e:
        if kind is not None:
            raise InvalidInput(f"{VARIABLE}={kind}: there is no compiled kernel: {e}") from e
        return TorchDecode(
            threads,
            f"attention on the CPU goes through torch, several times slower than moegen's own "
            f"kernel: {e}",
        )
    if kind is not None and kind not in library.variants:
        raise InvalidInput(
            f"{VARIABLE}={kind}: this machine has {', '.join(['torch', *library.variants])}"
        )
    return CompiledDecode(library, kind or next(iter(library.variants)), threads)


def attention_kind() -> str:
    """What `cpu_decode` gives on this machine: "C++ AVX-512", for example, or "torch"."""
    with closing(cpu_decode(1)) as decode:
        return decode.kind


def _checked(
    shape: DecodeShape,
    q: Tensor,
    new_kv: Tensor,
    store: Tensor,
    start: np.ndarray,
    length: np.ndarray,
    out: Tensor,
) -> tuple[np.ndarray, np.ndarray]:
    """start and length as the kernel reads them; what does not fit would be written anywhere."""
    rows, tensors = len(start), (q, new_kv, store, out)
    widths = (shape.n_heads * shape.dk, shape.kv_width, shape.kv_width, shape.n_heads * shape.dv)
    sizes = [(rows, widths[0]), (rows, widths[1]), (len(store), widths[2]), (rows, widths[3])]
    if [tuple(t.shape) for t in tensors] != sizes or len(length) != rows:
        raise InvalidInput(
            f"decode attention of {rows} rows takes q, new_kv, store and out of {sizes}, got "
            f"{[tuple(t.shape) for t in tensors]}"
        )
    if q.dtype not in _DTYPES or any(t.dtype != q.dtype for t in tensors):
        raise InvalidInput(
            f"decode attention takes one dtype of {[str(d) for d in _DTYPES]}, got "
            f"{[str(t.dtype) for t in tensors]}"
        )
    for t in tensors:
        if t.device.type != "cpu" or (t.shape[0] and t.stride(1) != 1):
            raise InvalidInput("decode attention takes tensors on the CPU with contiguous rows")
    if not store.is_contiguous():
        raise InvalidInput("decode attention takes a store without gaps between tokens")
    s = shape.sinks
    if s is not None and (
        s.dtype != torch.float32 or not s.is_contiguous() or tuple(s.shape) != (shape.n_heads,)
    ):
        raise InvalidInput(f"sinks are float32 [{shape.n_heads}], got {s.dtype} {tuple(s.shape)}")
    start = np.ascontiguousarray(start, dtype=np.int64)
    length = np.ascontiguousarray(length, dtype=np.int64)
    if rows and (start.min() < 0 or length.min() < 1 or (start + length).max() > len(store)):
        raise InvalidInput(f"a row lies outside the store's {len(store)} tokens, or has none")
    return start, length


def _require(failed: int) -> None:
    if failed:
        raise MachineError(
            "the CPU's attention got no memory, or no threads: plan with less host memory"
        )


def _balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Bounds of ``parts`` runs of neighbours, cut where the running cost passes each share."""
    ends = list(accumulate(costs))
    bounds, i = [0], 0
    for p in range(1, parts):
        share = ends[-1] * p / parts
        while i < len(costs) and ends[i] - costs[i] / 2 <= share:
            i += 1
        bounds.append(i)
    return [*bounds, len(costs)]


def _pool(threads: int) -> ThreadPoolExecutor:
    """``threads`` workers that use one torch thread each, all of them started."""
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        use_torch_threads(1)
        ready.wait()

    with own_torch_threads():
        pool = ThreadPoolExecutor(threads, "moegen-attn")
        try:
            for _ in range(threads):
                pool.submit(begin)
            ready.wait()
        except BaseException:
            ready.abort()  # those that wait for the others would wait for good
            raise
    return pool
