"""Decode attention: one new token a row, over that row's history in a KV store.

What a layer asks for, and what computes it on the CPU must offer; `decode_attention` picks one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moegen.errors import InvalidInput

#: The dtypes that attention takes.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DecodeShape:
    """A layer's decode attention: one new token a row, over that row's history.

    Attributes
    ----------
    n_heads, n_kv_heads : int
    dk, dv : int
        Numbers of a head's query and key, and of its value.
    latent : bool
        One key for all heads, whose first ``dv`` numbers are the value (absorbed MLA).
    scale : float
        Of the scores, before the softmax.
    window : int, optional
        Tokens that count, the new one included.
    sinks : Tensor, float32 [n_heads], optional
        Logits that take part in the softmax and have no value.
    """

    n_heads: int
    n_kv_heads: int
    dk: int
    dv: int
    latent: bool
    scale: float
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def kv_width(self) -> int:
        """Numbers of a token in the KV store."""
        return self.dk if self.latent else self.n_kv_heads * (self.dk + self.dv)


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

        Raises
        ------
        InvalidInput
            If sizes, dtypes, layouts or places do not agree: nothing has been written then.
        """
        start, length = _checked(shape, q, new_kv, store, start, length, out)
        self._attend(shape, q, new_kv, store, start, length, out)

    @abstractmethod
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
        """`attend`, of what has been checked."""

    @abstractmethod
    def read(self, data: Tensor) -> None:
        """Read memory with all threads, in order: the speed that attention is held against."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads."""


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
    if q.dtype not in DTYPES or any(t.dtype != q.dtype for t in tensors):
        raise InvalidInput(
            f"decode attention takes one dtype of {[str(d) for d in DTYPES]}, got "
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
