"""The ring slots of one graph, and the small buffers between lanes, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegen.exec.lanes import empty_host
from moegen.graph.model import ModelSpec
from moegen.graph.task import Ring, TaskGraph


@dataclass(frozen=True)
class Capacity:
    """The most that one step of a run can ask for, over all its steps.

    Attributes
    ----------
    rows, tokens : int
        Live rows and new tokens of a step.
    staged_tokens : int
        New tokens that ``pre_attn`` handles at once.
    slot_tokens : int
        Tokens of a micro-batch's KV, new ones included.
    """

    rows: int
    tokens: int
    staged_tokens: int
    slot_tokens: int


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
        model, strategy, layout = graph.model, graph.strategy, graph.layout
        assert model is not None and strategy is not None and layout is not None
        self.rings = graph.rings
        self.device, self.dtype = device, dtype
        self.bytes = {"gpu": 0, "host": 0}
        c, group = capacity, strategy.expert_group
        widths = _Widths(model, graph.phase)
        experts = max((x.n_experts for x in model.layers), default=0)
        self.rows = self._gpu("rows", 3 * c.tokens + 5 * c.rows, torch.int64)
        self.host_rows = self._host(3 * c.tokens + 5 * c.rows, torch.int64)
        self.dense = self._gpu("dense_weights", dense_nbytes, torch.uint8)
        self.expert = self._gpu("expert_weights", group * expert_nbytes, torch.uint8)
        self.q = self._gpu("qkv", (c.staged_tokens, widths.q), dtype)
        self.new_kv = self._gpu("qkv", (c.staged_tokens, widths.kv), dtype)
        self.kv = self._gpu("kv", (c.slot_tokens, widths.kv), dtype)
        self.attn_out = self._gpu("attn_out", (c.staged_tokens, widths.out), dtype)
        cpu_rows = layout.cpu_rows
        self.host_q = self._host((cpu_rows, widths.q), dtype)
        self.host_new_kv = self._host((cpu_rows, widths.kv), dtype)
        self.host_attn = self._host((cpu_rows, widths.out), dtype)
        self.counts = self._gpu("counts", experts, torch.int64)
        self.host_counts = self._host(experts, torch.int64)
        self.tokens = self._gpu("tokens", c.rows, torch.int64)
        self.host_tokens = self._host(c.rows, torch.int64)
        kept = c.rows if keep_logits else 0
        self.logits = self._gpu("logits", (kept, model.vocab), dtype)
        self.host_logits = self._host((kept, model.vocab), dtype)

    def _gpu(self, ring: str, size: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        slots = self.rings[ring].slots if ring in self.rings else 0
        shape = (size,) if isinstance(size, int) else size
        tensor = torch.empty((slots, *shape), dtype=dtype, device=self.device)
        self.bytes["gpu"] += tensor.nbytes
        return tensor

    def _host(self, size: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shape = (size,) if isinstance(size, int) else size
        tensor = empty_host(*shape, dtype=dtype, device=self.device)
        self.bytes["host"] += tensor.nbytes
        return tensor

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


class _Widths:
    """The widest query, KV and output of any layer, in elements."""

    def __init__(self, model: ModelSpec, phase: str) -> None:
        attention = [layer.attention for layer in model.layers]
        self.q = max(a.q_width(phase) for a in attention)  # pyright: ignore[reportArgumentType]
        self.kv = max(a.kv_width for a in attention)
        self.out = max(a.out_width(phase) for a in attention)  # pyright: ignore[reportArgumentType]
