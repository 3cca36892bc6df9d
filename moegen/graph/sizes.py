"""What a step puts into memory, buffer by buffer: the one place where buffers are sized.

Rings of a graph, the lines of a ledger and the tensors of the executor all take their sizes
from :class:`BufferSizes`. What ops hold beside them is in `moegen.graph.working`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from moegen.graph.bisect import greatest
from moegen.graph.model import Layer, ModelSpec, Phase
from moegen.graph.residency import ring_slots
from moegen.graph.strategy import Strategy
from moegen.graph.task import Layout
from moegen.graph.waves import room
from moegen.graph.workload import RunningSums, Workload

# The row table: int64 columns of a step's tokens and of its rows.
TOKEN_COLUMNS, ROW_COLUMNS = 3, 5
# Tensors of a blob begin at multiples of so many bytes, and no dense blob has more tensors.
ALIGN_BYTES, MOST_TENSORS = 64, 16
# Tensors that share a block of memory begin at multiples of this.
BLOCK_ALIGN_BYTES = 256
# Families whose router is kept and computed in float32 whatever the model's dtype.
FLOAT32_ROUTER = frozenset({"deepseek_v2"})

# What lanes stage in host memory, by the pieces' names; the row table is made up there.
HOST_STAGED = ("rows", "host_q", "host_new_kv", "host_attn", "host_counts", "host_tokens")

Kind = Literal["activation", "int64", "byte"]


@dataclass(frozen=True)
class Capacity:
    """The most that one step can ask for.

    Attributes
    ----------
    rows, tokens : int
        Live rows and new tokens of a step.
    staged_tokens : int
        New tokens that ``pre_attn`` handles at once.
    slot_tokens : int
        Tokens of a micro-batch's KV, new ones included; 0 in prefill.
    cpu_rows : int
        Rows that attend on the CPU.
    part_rows : int
        Rows of a micro-batch.
    longest : int
        Tokens of the longest row.
    """

    rows: int
    tokens: int
    staged_tokens: int
    slot_tokens: int
    cpu_rows: int = 0
    part_rows: int = 0
    longest: int = 0

    @classmethod
    def of(
        cls, phase: Phase, layout: Layout, new: Sequence[int], context: Sequence[int]
    ) -> Capacity:
        """What a layout's steps ask for.

        Parameters
        ----------
        new, context : sequence of int, by batch position
            New tokens of a row, and tokens it attends to, itself included, at most. Positions
            missing at the end are empty.
        """
        parts, tokens, decode = layout.parts, sum(new), phase == "decode"
        staged = [sum(new[p.start : p.stop]) for p in parts]
        slots = [sum(context[p.start : p.stop]) for p in parts]
        return cls(
            rows=layout.rows,
            tokens=tokens,
            staged_tokens=tokens if decode else max(staged, default=0),
            slot_tokens=max(slots, default=0) if decode else 0,
            cpu_rows=layout.cpu_rows,
            part_rows=max(layout.micro_batches, default=0),
            longest=max(context, default=0),
        )

    @classmethod
    def most(cls, several: Iterable[Capacity]) -> Capacity:
        """What is enough for each of several."""
        columns = zip(*(vars(c).values() for c in several), strict=True)
        return cls(*(max(column) for column in columns))

    @classmethod
    def worst(cls, s: Strategy, work: Workload, phase: Phase, batch: int | None = None) -> Capacity:
        """What any batch of the workload's rows asks for, in any order, at any of its steps.

        Parameters
        ----------
        batch : int, optional
            Prefill: so many rows at most are dealt out to waves together (decode's B). Unless
            given a wave is any B rows, in any order.
        """
        if phase == "prefill" and batch is not None:
            most = room(s, work, batch)
            return cls(
                rows=most.rows,
                tokens=most.tokens,
                staged_tokens=most.part_tokens,
                slot_tokens=0,
                part_rows=most.part_rows,
                longest=work.max_prompt_len,
            )
        if phase == "prefill":
            part = min(s.b_a, s.B)
            return cls(
                rows=s.B,
                tokens=work.longest(s.B, prompt_only=True),
                staged_tokens=work.longest(part, prompt_only=True),
                slot_tokens=0,
                part_rows=part,
                longest=work.max_prompt_len,
            )
        part = min(s.b_a, most_rows(work, s.B, 1 - s.omega))
        return cls(
            rows=s.B,
            tokens=s.B,
            staged_tokens=s.B,
            slot_tokens=work.longest(part),
            cpu_rows=most_rows(work, s.B, s.omega),
            part_rows=part,
            longest=work.max_len,
        )


@lru_cache(maxsize=256)
def most_rows(work: Workload, B: int, share: float) -> int:
    """The most rows that ``share`` of a decode batch's KV can be, rounded to whole rows.

    The builder gives a side k rows only where those before the last, and half of it, are
    within the share of the total. That is easiest with the shortest rows on this side and the
    longest on the other, and at the first step, where lengths differ most from each other.
    """
    shortest, longest = work.first_step
    mean = (work.prompt_tokens + work.n) / work.n
    longest_row = work.max_prompt_len + 1

    def tokens(rows: int, sums: RunningSums) -> float:
        # Beyond the workload as Workload.longest has it.
        return sums.first(rows) + max(0, rows - work.n) * mean

    def can_be(k: int) -> bool:
        others, rest = tokens(k - 1, shortest), tokens(B - k, longest)
        # A long row at the end may be cut in the side's favour.
        last = longest_row if share > 0.5 else tokens(k, shortest) - others
        slack = 1e-9 * (others + last + rest)
        return (1 - share) * others + (0.5 - share) * last <= share * rest + slack

    return greatest(0, B, can_be)


class Piece(NamedTuple):
    """One tensor of a ring's slot: the ring, its shape in elements, what an element is."""

    ring: str
    shape: tuple[int, ...]
    kind: Kind


class BufferSizes:
    """Every buffer that crosses lanes, in elements and bytes.

    Parameters
    ----------
    model : ModelSpec
    s : Strategy
    phase : {"decode", "prefill"}
    capacity : Capacity
        The largest step.

    Attributes
    ----------
    q, kv, out : int
        Widest query, KV and attention output of any layer, in elements.
    pieces : dict of str to Piece
        The tensors that the executor allocates, by its names for them.
    """

    def __init__(self, model: ModelSpec, s: Strategy, phase: Phase, capacity: Capacity) -> None:
        self.model, self.strategy, self.phase, self.capacity = model, s, phase, capacity
        self._slots = ring_slots(model, s) | {"qkv": 2}
        attention = [layer.attention for layer in model.layers]
        self.q = q = max(a.q_width(phase) for a in attention)
        self.kv = kv = max(a.kv_width for a in attention)
        self.out = out = max(a.out_width(phase) for a in attention)
        c = capacity
        table = TOKEN_COLUMNS * c.tokens + ROW_COLUMNS * c.rows
        experts = max(layer.n_experts for layer in model.layers)
        dense, expert = (max(blobs) for blobs in blob_bytes(model))
        self.pieces = {
            "rows": Piece("rows", (table,), "int64"),
            "dense": Piece("dense_weights", (dense,), "byte"),
            "expert": Piece("expert_weights", (s.expert_group * expert,), "byte"),
            "q": Piece("qkv", (c.staged_tokens, q), "activation"),
            "new_kv": Piece("qkv", (c.staged_tokens, kv), "activation"),
            "kv": Piece("kv", (c.slot_tokens, kv), "activation"),
            "attn_out": Piece("attn_out", (c.staged_tokens, out), "activation"),
            "host_q": Piece("host_qkv", (c.cpu_rows, q), "activation"),
            "host_new_kv": Piece("host_qkv", (c.cpu_rows, kv), "activation"),
            "host_attn": Piece("host_attn", (c.cpu_rows, out), "activation"),
            "counts": Piece("counts", (experts,), "int64"),
            "host_counts": Piece("host_counts", (experts,), "int64"),
            "logits": Piece("logits", (c.rows, model.vocab), "activation"),
            "tokens": Piece("tokens", (c.rows,), "int64"),
            "host_tokens": Piece("host_tokens", (c.rows,), "int64"),
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of one block with every slot of every ring on the GPU, each tensor aligned."""
        return aligned(
            *(
                self.slots(piece.ring) * self._piece_bytes(piece)
                for piece in self.pieces.values()
                if not piece.ring.startswith("host_")
            )
        )

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one block with what lanes stage in host memory, each tensor aligned."""
        return aligned(*(self._piece_bytes(self.pieces[name]) for name in HOST_STAGED))

    def slots(self, ring: str) -> int:
        """Slots of a ring, as the strategy asks for them; a step may use fewer."""
        return self._slots.get(ring, 1)

    def slot_bytes(self, ring: str) -> int:
        """Bytes of one slot of a ring."""
        return sum(self._piece_bytes(p) for p in self.pieces.values() if p.ring == ring)

    def _piece_bytes(self, piece: Piece) -> int:
        size = {"activation": self.model.act_bytes, "int64": 8, "byte": 1}
        return math.prod(piece.shape) * size[piece.kind]

    def ring_bytes(self, *rings: str) -> int:
        """Bytes of all slots of rings."""
        return sum(self.slots(ring) * self.slot_bytes(ring) for ring in rings)

    @property
    def rings(self) -> dict[str, tuple[int, int, str]]:
        """Slots, bytes of a slot and place ("gpu" or "host") of every ring."""
        names = dict.fromkeys(piece.ring for piece in self.pieces.values())
        return {
            name: (
                self.slots(name),
                self.slot_bytes(name),
                "host" if name.startswith("host_") else "gpu",
            )
            for name in names
        }


def aligned(*n_bytes: Any) -> Any:
    """Bytes that pieces of these sizes, ints or arrays, take in a block, one behind the other."""
    return sum(-(-n // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES for n in n_bytes)


@lru_cache(maxsize=64)
def packed_bytes(model: ModelSpec) -> int:
    """Host memory of all weights as the executor packs them: float32 routers, aligned tensors."""
    blobs = zip(model.layers, *blob_bytes(model), strict=True)
    return model.head_bytes + sum(dense + x.n_experts * expert for x, dense, expert in blobs)


@lru_cache(maxsize=64)
def blob_bytes(model: ModelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of the dense blob, and of one expert, of every layer as packed, at most."""
    # Equal layers share one instance.
    distinct = {id(x): x for x in model.layers}
    sizes = {
        key: (dense_blob_bytes(model, x), expert_blob_bytes(model, x))
        for key, x in distinct.items()
    }
    dense, expert = zip(*(sizes[id(x)] for x in model.layers), strict=True)
    return dense, expert


def dense_blob_bytes(model: ModelSpec, layer: Layer) -> int:
    """Bytes of a layer's dense blob as packed, at most: alignment and a float32 router added."""
    a, attention = model.act_bytes, layer.attention
    router = 0
    if model.model_type in FLOAT32_ROUTER:
        router = 4 * layer.router.params - layer.router.bytes
    # Every tensor has one of these as a dimension: multiples of the alignment cost nothing.
    widths = [model.hidden, attention.q_lora_rank or 0, attention.kv_lora_rank]
    if attention.qkv_bias:
        widths.append(attention.kv_width)
    return layer.dense_bytes + router + _padding(widths, a, MOST_TENSORS)


def expert_blob_bytes(model: ModelSpec, layer: Layer) -> int:
    """Bytes of one of a layer's experts as packed, at most; 0 in a layer without any."""
    if not layer.n_experts:
        return 0
    stored = layer.expert_bytes + layer.expert_scale_bytes
    return stored + _padding([model.hidden], model.act_bytes, 2)


def _padding(widths: Iterable[int], act_bytes: int, tensors: int) -> int:
    aligned = all(width * act_bytes % ALIGN_BYTES == 0 for width in widths)
    return 0 if aligned else tensors * (ALIGN_BYTES - 1)
