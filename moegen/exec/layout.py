"""Layout: named tensors inside one flat byte buffer, on the host or in a GPU slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 64  # bytes: a cache line, and more than any dtype or vector load asks for


class Entry(NamedTuple):
    """A tensor inside a flat buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Names to places in a flat byte buffer, each aligned to 64 bytes.

    Parameters
    ----------
    entries : mapping of str to Entry
    nbytes : int
        Size of the buffer, a multiple of 64.
    """

    entries: Mapping[str, Entry]
    nbytes: int

    @classmethod
    def of(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype_of: Callable[[str], torch.dtype]
    ) -> Layout:
        """The tensors of ``shapes`` one behind the other, in that order."""
        entries, offset = {}, 0
        for name, shape in shapes.items():
            dtype = dtype_of(name)
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            entries[name] = Entry(offset, tuple(shape), dtype, nbytes)
            offset += -(-nbytes // ALIGN) * ALIGN
        return cls(MappingProxyType(entries), offset)

    def view(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors of a uint8 buffer of ``nbytes`` bytes or more, without copying."""
        return {
            name: flat[e.offset : e.offset + e.nbytes].view(e.dtype).view(e.shape)
            for name, e in self.entries.items()
        }

    def stacked(self, flat: Tensor) -> dict[str, Tensor]:
        """The same of several such buffers one behind the other: tensors [n, ...], not copied.

        Their first stride is the buffer's size, whatever the tensor's own.
        """
        n = flat.numel() // self.nbytes
        stacks = {}
        for name, one in self.view(flat).items():
            stride = self.nbytes // one.dtype.itemsize
            stacks[name] = one.as_strided((n, *one.shape), (stride, *one.stride()))
        return stacks
