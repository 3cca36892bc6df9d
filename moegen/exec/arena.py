"""The GPU lane's working memory: one block, given out and taken back like a stack.

What a step holds is planned (`moegen.graph.working`), so it is allocated once and handed out
piece by piece; asking for more than was planned is an error of ours, and is found at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moegen.errors import MoegenError
from moegen.graph.sizes import aligned
from moegen.units import format_bytes


class ArenaFull(MoegenError):
    """More working memory was asked for than the ledger had planned."""


class Arena:
    """A stack of tensors in one block of memory.

    Parameters
    ----------
    nbytes : int
    device : torch.device

    Attributes
    ----------
    peak : int
        The most bytes that were given out at a time.
    poison : bool
        Fill what is given back with nonsense: a test's way to find what is used after that.
    """

    poison = False

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0
        self.peak = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised dense tensor, until the frame that it was taken in ends.

        Raises
        ------
        ArenaFull
        """
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._used
        end = start + nbytes
        if end > self.block.numel():
            raise ArenaFull(
                f"{format_bytes(nbytes)} of working memory asked for with {format_bytes(start)} of "
                f"{format_bytes(self.block.numel())} in use: the ledger counts too little"
            )
        self._used = aligned(end)
        self.peak = max(self.peak, self._used)
        return self.block[start:end].view(dtype).view(shape)

    @contextmanager
    def frame(self) -> Iterator[None]:
        """What is taken inside is given back at the end."""
        before = self._used
        try:
            yield
        finally:
            if self.poison:
                self.block[before : self._used].fill_(0xFF)  # NaN as a float, -1 as an int
            self._used = before
