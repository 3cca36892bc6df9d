"""The CPU's decode attention: in C++ where a compiler is found, else in torch.

One object holds its threads and is used by every layer of a run. It reads each row's history
where it lies in the KV store and writes the new token's KV there first.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from moegen.errors import InvalidInput, MachineError
from moegen.exec.attention import DTYPES, CpuDecode, DecodeShape
from moegen.exec.kernels import cpu_attention
from moegen.exec.torch_attention import TorchDecode
from moegen.graph.detect import cores

#: Takes a variant by name: "torch", or one of the compiled ones ("AVX2", "portable").
VARIABLE = "MOEGEN_CPU_ATTENTION"


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
        if library.not_kept is not None:
            self.note = (
                f"the CPU's attention is compiled anew by each process, in some ten seconds: the "
                f"cache cannot be written ({library.not_kept})"
            )
        self._functions = library.functions
        self._handle: int | None = self._functions.moegen_open(library.variants[variant], threads)

    def _attend(
        self,
        shape: DecodeShape,
        q: Tensor,
        new_kv: Tensor,
        store: Tensor,
        start: np.ndarray,
        length: np.ndarray,
        out: Tensor,
    ) -> None:
        s = shape.sinks
        failed = self._functions.moegen_decode(
            self._open(),
            DTYPES.index(q.dtype),
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


def usual_threads(device: torch.device) -> int:
    """Threads of the CPU's attention beside the lanes of ``device``.

    On CUDA one core is left to the thread that issues work; on CPU lanes attention takes as many
    threads as torch's products do.
    """
    return max(1, cores() - 1) if device.type == "cuda" else torch.get_num_threads()


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


def _require(failed: int) -> None:
    if failed:
        raise MachineError(
            "the CPU's attention got no memory, or no threads: plan with less host memory"
        )
