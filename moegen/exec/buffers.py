"""The ring slots of one graph, and the small buffers between lanes, as tensors."""

from __future__ import annotations

import torch

from moegen.exec.lanes import empty_host
from moegen.graph.sizes import BufferSizes, Capacity
from moegen.graph.task import Ring, TaskGraph

__all__ = ["Buffers", "Capacity"]


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
        self.rows = self._gpu("rows")
        self.host_rows = self._host("rows")
        # The weights know best how they are packed.
        self.dense = self._gpu("dense", (dense_nbytes,))
        self.expert = self._gpu("expert", (strategy.expert_group * expert_nbytes,))
        self.q, self.new_kv = self._gpu("q"), self._gpu("new_kv")
        self.kv = self._gpu("kv")
        self.attn_out = self._gpu("attn_out")
        self.host_q, self.host_new_kv = self._host("host_q"), self._host("host_new_kv")
        self.host_attn = self._host("host_attn")
        self.counts, self.host_counts = self._gpu("counts"), self._host("host_counts")
        self.tokens, self.host_tokens = self._gpu("tokens"), self._host("host_tokens")
        # Logits stay within the GPU lane unless someone wants them.
        kept = (capacity.rows if keep_logits else 0, model.vocab)
        self.logits, self.host_logits = self._gpu("logits", kept), self._host("logits", kept)

    def _gpu(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        piece = self.sizes.pieces[name]
        slots = self.rings[piece.ring].slots if piece.ring in self.rings else 0
        size = (slots, *(piece.shape if shape is None else shape))
        return torch.empty(size, dtype=self._dtype(name), device=self.device)

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
