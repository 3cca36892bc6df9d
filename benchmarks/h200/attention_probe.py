"""Made-up rows of KV for the CPU's decode attention by itself, to be timed and checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from meters import pinned_buffer

from moegen.exec.attention import CpuDecode, DecodeShape


class Rows:
    """Rows of KV in one layer's store, one behind the other, and a new token for each.

    Parameters
    ----------
    shape : DecodeShape
    lengths : sequence of int
        Tokens of each row, the new one included.
    dtype : torch.dtype
    device : str
        "cuda" pins the store.
    """

    def __init__(
        self, shape: DecodeShape, lengths: Sequence[int], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.shape, self.lengths = shape, list(lengths)
        rows, tokens, width = len(self.lengths), sum(self.lengths), shape.kv_width
        data, self._pins = pinned_buffer(tokens * width * dtype.itemsize, device)
        self.store = data.view(dtype).view(tokens, width)
        generator = torch.Generator().manual_seed(0)
        # Of a prime length, so that no row repeats another.
        pattern = torch.randn(1021, width, generator=generator).to(dtype)
        for at in range(0, tokens, len(pattern)):
            self.store[at : at + len(pattern)] = pattern[: tokens - at]
        self.length = torch.tensor(self.lengths)
        self.start = self.length.cumsum(0) - self.length
        self.last = self.start + self.length - 1
        self.q = torch.randn(rows, shape.n_heads * shape.dk, generator=generator).to(dtype)
        self.new_kv = torch.randn(rows, width, generator=generator).to(dtype)
        self.out = torch.empty(rows, shape.n_heads * shape.dv, dtype=dtype)

    def attend(self, decode: CpuDecode) -> torch.Tensor:
        """One step of all rows, as the CPU lane makes it; gives ``out``."""
        start, length = self.start.numpy(), self.length.numpy()
        decode.attend(self.shape, self.q, self.new_kv, self.store, start, length, self.out)
        return self.out

    @property
    def nbytes(self) -> int:
        """KV bytes that a step reads."""
        return self.store.nbytes

    def flops(self) -> float:
        """Of a step."""
        s = self.shape
        return 2.0 * s.n_heads * (s.dk + s.dv) * sum(self.lengths)

    def close(self) -> None:
        self._pins.unregister()
