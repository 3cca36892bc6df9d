"""The ring slots of one graph, and the small buffers between lanes, as tensors.

Those on the GPU share one block: the allocator rounds each request up.
"""

from __future__ import annotations

import math

import torch

from moegen.exec.arena import Arena
from moegen.exec.lanes import empty_host
from moegen.graph.sizes import BufferSizes, Capacity
from moegen.graph.task import Ring, TaskGraph
from moegen.graph.working import aligned

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
        self.host_rows = self._host("rows")
        self.host_q, self.host_new_kv = self._host("host_q"), self._host("host_new_kv")
        self.host_attn = self._host("host_attn")
        self.host_counts, self.host_tokens = self._host("host_counts"), self._host("host_tokens")
        # Logits stay within the GPU lane unless someone wants them.
        kept = capacity.rows if keep_logits else 0
        self.host_logits = self._host("logits", (kept, model.vocab))
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

    def _host(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        size = self.sizes.pieces[name].shape if shape is None else shape
        return empty_host(*size, dtype=self._dtype(name), device=self.device)

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

    def ring(self, name: str) -> Ring:
        """The ring called ``name``."""
        return self.rings[name]
