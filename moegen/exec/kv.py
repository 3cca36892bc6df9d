"""The host KV store: the whole cache of every sequence in flight.

Each row owns a contiguous range of tokens in every layer, laid out
[token][K and V][head][dim] (or the latent and its rope key): a CPU reads that at twice
the speed of a token-major order over rows, and zero-copy kernels make mixed lengths,
appends and fetches cheap in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from moegen.errors import MachineError
from moegen.exec.pinning import Pins, host_buffer
from moegen.graph.model import ModelSpec
from moegen.units import format_bytes


class KVStore:
    """KV of all layers for one batch.

    Parameters
    ----------
    spec : ModelSpec
    tokens : int
        Tokens of all rows together, prompts and what they may generate.
    dtype : torch.dtype
    pin : bool
        Make the memory readable by CUDA kernels, if the system lets us.

    Attributes
    ----------
    layers : list of Tensor, [tokens, kv_width]
    pinned : bool
        Whether kernels can read and write it in place.
    note : str or None
        Why not, if that was asked for.
    """

    def __init__(self, spec: ModelSpec, tokens: int, dtype: torch.dtype, *, pin: bool) -> None:
        self.tokens = tokens
        self.layers: list[torch.Tensor] = []
        self.note: str | None = None
        self._pins = Pins()
        buffers = []
        for layer in spec.layers:
            width = layer.attention.kv_width
            buffers.append(host_buffer(tokens * width * dtype.itemsize, huge=pin))
            self.layers.append(buffers[-1].view(dtype).view(tokens, width))
        self.nbytes = sum(b.nbytes for b in buffers)
        if pin:
            # Touched before it is registered: registering untouched memory is slow.
            with ThreadPoolExecutor() as pool:
                list(pool.map(torch.Tensor.zero_, buffers))
            problem = self._pins.register(buffers)
            if problem is not None:
                self.note = (
                    f"the KV store of {format_bytes(self.nbytes)} is not pinned, its copies to and "
                    f"from the GPU will be slow: {problem}"
                )

    @property
    def pinned(self) -> bool:
        return self._pins.complete

    def allocate(self, lengths: Sequence[int]) -> list[int]:
        """First token of each of a batch's rows, one behind the other.

        Raises
        ------
        MachineError
            If they do not fit the store.
        """
        need = sum(lengths)
        if need > self.tokens:
            per_token = self.nbytes // max(1, self.tokens)
            raise MachineError(
                f"the KV store holds {self.tokens} tokens ({format_bytes(self.nbytes)}) and the "
                f"batch needs {need}, {format_bytes((need - self.tokens) * per_token)} more: "
                f"take a smaller B"
            )
        starts, at = [], 0
        for n in lengths:
            starts.append(at)
            at += n
        return starts

    def close(self) -> None:
        """Give the memory back."""
        self._pins.unregister()
        self.layers = []
