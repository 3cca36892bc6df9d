"""The ring slots of one graph, and the small buffers between lanes, as tensors.

Those on the GPU share one block, for the allocator rounds each request up; those in host memory
share another, which is pinned as a whole.
"""

from __future__ import annotations

import math

import torch

from moegen.exec.arena import Arena
from moegen.exec.pinning import Pins, host_buffer
from moegen.graph.sizes import HOST_STAGED, BufferSizes, Capacity, aligned
from moegen.graph.task import TaskGraph

__all__ = ["Buffers", "Capacity"]


GPU_BUFFERS = (
    "rows", "dense", "expert", "q", "new_kv", "kv", "attn_out", "counts", "tokens", "logits",
)  # fmt: skip


class Buffers:
    """Every buffer that crosses lanes, one tensor a ring with the slots in front.

    Parameters
    ----------
    graph : TaskGraph
        Its rings say how many slots each buffer has.
    capacity : Capacity
    dense_nbytes, expert_nbytes : int
        Bytes of the largest dense blob and expert as packed.
    dtype : torch.dtype
    device : torch.device
    keep_logits : bool
        Bring logits down with the tokens.
    """

    rows: torch.Tensor
    dense: torch.Tensor
    expert: torch.Tensor
    q: torch.Tensor
    new_kv: torch.Tensor
    kv: torch.Tensor
    attn_out: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    host_rows: torch.Tensor
    host_q: torch.Tensor
    host_new_kv: torch.Tensor
    host_attn: torch.Tensor
    host_counts: torch.Tensor
    host_tokens: torch.Tensor
    host_logits: torch.Tensor

    def __init__(
        self,
        graph: TaskGraph,
        capacity: Capacity,
        *,
        dense_nbytes: int,
        expert_nbytes: int,
        dtype: torch.dtype,
        device: torch.device,
        keep_logits: bool = False,
    ) -> None:
        model, strategy = graph.model, graph.strategy
        assert model is not None and strategy is not None
        self.rings = graph.rings
        self.device, self.dtype = device, dtype
        self.sizes = BufferSizes(model, strategy, graph.phase, capacity)
        self._pins = Pins()
        self._stage_in_host_memory(capacity.rows if keep_logits else 0)
        # The weights know best how they are packed.
        packed = {"dense": (dense_nbytes,), "expert": (strategy.expert_group * expert_nbytes,)}
        shapes = {
            name: (self._slots(name), *packed.get(name, self.sizes.pieces[name].shape))
            for name in GPU_BUFFERS
        }
        block = Arena(
            aligned(*(math.prod(x) * self._dtype(name).itemsize for name, x in shapes.items())),
            device,
        )
        for name, shape in shapes.items():
            setattr(self, name, block.take(*shape, dtype=self._dtype(name)))

    def _slots(self, name: str) -> int:
        ring = self.sizes.pieces[name].ring
        return self.rings[ring].slots if ring in self.rings else 0

    def _stage_in_host_memory(self, kept_rows: int) -> None:
        """What lanes stage there: one block, which the GPU reads and writes itself.

        Logits stay within the GPU lane unless someone wants those of ``kept_rows``.
        """
        shapes = {name: self.sizes.pieces[name].shape for name in HOST_STAGED}
        shapes["logits"] = (kept_rows, self.sizes.pieces["logits"].shape[-1])
        sizes = {name: math.prod(x) * self._dtype(name).itemsize for name, x in shapes.items()}
        block = host_buffer(aligned(*sizes.values())).zero_()
        if self.device.type == "cuda" and self._pins.register([block]) is not None:
            # Kernels have no other way to these: the driver's own memory is rounded up, but does
            # not count against the limit on locked memory.
            block = torch.empty(block.nbytes, dtype=torch.uint8, pin_memory=True)
        at = 0
        for name, shape in shapes.items():
            piece = block[at : at + sizes[name]].view(self._dtype(name)).view(shape)
            setattr(self, name if name.startswith("host_") else f"host_{name}", piece)
            at += aligned(sizes[name])

    def _dtype(self, name: str) -> torch.dtype:
        kind = self.sizes.pieces[name].kind
        return {"activation": self.dtype, "int64": torch.int64, "byte": torch.uint8}[kind]

    def poison(self) -> None:
        """Fill every buffer with nonsense: a test's way to find what is read unwritten."""
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8:
                tensor.fill_(0xFF)
