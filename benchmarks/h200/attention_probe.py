"""The CPU lane's decode attention by itself: over made-up KV, to be timed and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from meters import pinned_buffer

from moegen.exec.attention import DecodeShape
from moegen.exec.decode_attention import cpu_decode


@dataclass(frozen=True)
class Heads:
    """A model's decode attention: grouped queries, or heads that share one latent."""

    n_heads: int
    n_kv_heads: int
    dk: int
    dv: int
    latent: bool = False

    @property
    def kv_width(self) -> int:
        """Elements that a token leaves in the store."""
        return self.dk if self.latent else self.n_kv_heads * (self.dk + self.dv)

    @property
    def scale(self) -> float:
        return self.dk**-0.5

    def flops(self, tokens: int) -> float:
        """Of a decode step over so many tokens of history."""
        return 2.0 * self.n_heads * (self.dk + self.dv) * tokens


class Attender:
    """Decode attention with a number of threads, as the CPU lane calls it."""

    def __init__(self, heads: Heads, threads: int) -> None:
        self.heads, self.threads = heads, threads
        self._decode = cpu_decode(threads)
        self.kind = self._decode.kind
        h = heads
        self._shape = DecodeShape(h.n_heads, h.n_kv_heads, h.dk, h.dv, h.latent, h.scale)

    def decode(self, x: Rows) -> torch.Tensor:
        """One step of all rows; returns the output, [rows, n_heads * dv]."""
        start, length = x.start.numpy(), x.length.numpy()
        self._decode.attend(self._shape, x.q, x.new_kv, x.store, start, length, x.out)
        return x.out

    def read(self, store: torch.Tensor) -> None:
        """Stream through all of the store once, with the same threads."""
        self._decode.read(store)

    def close(self) -> None:
        self._decode.close()


class Rows:
    """Rows of KV in one layer's store, one behind the other, and a new token for each.

    Parameters
    ----------
    heads : Heads
    lengths : sequence of int
        Tokens of each row, the new one included.
    dtype : torch.dtype
    device : str
        "cuda" pins the store.
    """

    def __init__(
        self, heads: Heads, lengths: Sequence[int], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.lengths = list(lengths)
        tokens, width = sum(self.lengths), heads.kv_width
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
        rows = len(self.lengths)
        self.q = torch.randn(rows, heads.n_heads * heads.dk, generator=generator).to(dtype)
        self.new_kv = torch.randn(rows, width, generator=generator).to(dtype)
        self.out = torch.empty(rows, heads.n_heads * heads.dv, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """KV bytes that a step reads."""
        return self.store.nbytes

    def close(self) -> None:
        self._pins.unregister()
