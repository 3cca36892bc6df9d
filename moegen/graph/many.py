"""The ledger of many strategies at once: the same bytes as `moegen.graph.memory`, in columns.

A search asks of tens of thousands of strategies whether they fit. What B, b_a, b_e, ω and the
expert group need beside slots and weights is taken from the ledger's own parts, once for each
combination that occurs; slots and resident weights are added in arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from moegen.graph.allocator import SMALL_BYTES, library_bytes, reserved_bytes
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import host_bytes
from moegen.graph.model import ModelSpec, Phase
from moegen.graph.residency import dense_bytes_kept, spread
from moegen.graph.sizes import BufferSizes, Capacity, aligned, blob_bytes
from moegen.graph.strategy import Fetch, Strategy
from moegen.graph.working import kept_bytes, largest_frame
from moegen.graph.workload import Workload

FETCHES: tuple[Fetch, Fetch] = ("all", "routed")


@dataclass(frozen=True, eq=False)
class Strategies:
    """Strategies in columns, each of shape [strategies].

    The fields are those of :class:`moegen.graph.strategy.Strategy`; ``fetch`` is an index of
    :data:`FETCHES`.
    """

    B: np.ndarray
    b_a: np.ndarray
    b_e: np.ndarray
    s_expert: np.ndarray
    s_params: np.ndarray
    omega: np.ndarray
    kv_slots: np.ndarray
    dense_slots: np.ndarray
    expert_group: np.ndarray
    fetch: np.ndarray

    @classmethod
    def of(cls, several: Sequence[Strategy]) -> Strategies:
        """Columns of strategies made one by one."""
        rows = [s.with_(fetch="all").to_dict() | {"fetch": FETCHES.index(s.fetch)} for s in several]
        return cls(**{name: np.array([row[name] for row in rows]) for name in COLUMNS})

    @classmethod
    def product(cls, **values: Sequence[Any]) -> Strategies:
        """Every combination of the values of each field, the last field's changing fastest."""
        grids = np.meshgrid(*(values[name] for name in COLUMNS), indexing="ij")
        return cls(*(grid.reshape(-1) for grid in grids))

    @classmethod
    def concatenate(cls, several: Sequence[Strategies]) -> Strategies:
        """All of them, one after the other."""
        return cls(*(np.concatenate([getattr(x, name) for x in several]) for name in COLUMNS))

    def __len__(self) -> int:
        return len(self.B)

    def take(self, which: Any) -> Strategies:
        """Those at some indices, or where a mask is true."""
        return Strategies(*(getattr(self, name)[which] for name in COLUMNS))

    def with_(self, **columns: Any) -> Strategies:
        """A copy with some columns replaced, by arrays or by one value for all."""
        kept = {name: getattr(self, name) for name in COLUMNS}
        new = {k: np.broadcast_to(np.asarray(v), self.B.shape) for k, v in columns.items()}
        return Strategies(**kept | new)

    def distinct(self) -> Strategies:
        """Each strategy once, in order of first appearance."""
        table = np.stack([getattr(self, name).astype(float) for name in COLUMNS])
        first = np.unique(table, axis=1, return_index=True)[1]
        return self.take(np.sort(first))

    def rows(self) -> list[tuple[float, ...]]:
        """Each strategy as a tuple, in the order of the columns."""
        return list(zip(*(getattr(self, name).tolist() for name in COLUMNS), strict=True))

    def strategy(self, i: int) -> Strategy:
        """One of them."""
        row = {name: getattr(self, name)[i].item() for name in COLUMNS}
        return Strategy(**row | {"fetch": FETCHES[row["fetch"]]})


COLUMNS = tuple(f.name for f in fields(Strategies))


@dataclass(frozen=True, eq=False)
class Kept:
    """What ``s_params`` keeps on the GPU, for many values of it.

    Attributes
    ----------
    n_dense, n_experts : ndarray of int, shape [strategies]
        Dense blobs and experts that stay, of the whole model.
    packed_bytes : ndarray of int, shape [strategies]
        What they take.
    """

    n_dense: np.ndarray
    n_experts: np.ndarray
    packed_bytes: np.ndarray

    @classmethod
    def of(cls, model: ModelSpec, s_params: np.ndarray) -> Kept:
        """As `moegen.graph.residency.residency` has it."""
        n_dense = np.zeros(s_params.shape, dtype=np.int64)
        of_dense = dense_bytes_kept(model)
        for n, nbytes in enumerate(of_dense):
            n_dense = np.where(nbytes <= s_params, n, n_dense)
        left = s_params - np.array(of_dense)[n_dense]
        n_experts = np.minimum(left // _expert_bytes(model), _experts(model))
        return cls(n_dense, n_experts, _packed_bytes(model, n_dense, n_experts))

    @classmethod
    def most(cls, model: ModelSpec, room_bytes: np.ndarray) -> np.ndarray:
        """The greatest useful ``s_params`` whose weights as packed take no more than that."""
        packed = np.array(_packed_dense(model))
        n_dense = np.searchsorted(np.maximum.accumulate(packed), room_bytes, side="right") - 1
        left = room_bytes - packed[n_dense.clip(0)]
        each = max(1, blob_bytes(model)[1][model.moe_layers[0]]) if model.moe_layers else 1
        n_experts = np.clip(left // each, 0, _experts(model))
        s_params = np.array(dense_bytes_kept(model))[n_dense.clip(0)]
        s_params = np.where(n_dense < 0, 0, s_params + n_experts * _expert_bytes(model))
        # Alignment, or a blob packed larger than its weights, may ask for a little more.
        for _ in range(4):
            over = cls.of(model, s_params).packed_bytes > room_bytes
            if not over.any():
                break
            s_params = np.where(over, np.maximum(0, s_params - _expert_bytes(model)), s_params)
        return s_params


def _experts(model: ModelSpec) -> int:
    return sum(model.layers[i].n_experts for i in model.moe_layers)


@lru_cache(maxsize=64)
def _expert_bytes(model: ModelSpec) -> int:
    if not model.moe_layers:
        return 1
    first = model.layers[model.moe_layers[0]]
    return first.expert_bytes + first.expert_scale_bytes


@lru_cache(maxsize=64)
def _packed_dense(model: ModelSpec) -> tuple[int, ...]:
    blobs = blob_bytes(model)[0]
    return tuple(
        sum(aligned(k * b) for k, b in zip(spread(n, model.n_layers), blobs, strict=True))
        for n in range(model.n_layers + 1)
    )


def _packed_bytes(model: ModelSpec, n_dense: np.ndarray, n_experts: np.ndarray) -> np.ndarray:
    packed = np.array(_packed_dense(model))[n_dense]
    if not model.moe_layers:
        return packed
    # Spread evenly, some layers keep one expert more than the others.
    each, layers = blob_bytes(model)[1][model.moe_layers[0]], model.n_moe_layers
    few, more = np.divmod(n_experts, layers)
    return packed + (layers - more) * aligned(few * each) + more * aligned((few + 1) * each)


class Ledgers:
    """Totals of the ledger for many strategies of one phase.

    Parameters
    ----------
    batch : int, optional
        Prefill: decode's B, as for :func:`moegen.graph.memory.memory`.
    """

    def __init__(
        self,
        model: ModelSpec,
        hw: HardwareSpec,
        work: Workload,
        phase: Phase = "decode",
        batch: int | None = None,
    ) -> None:
        self.model, self.hw, self.work, self.batch = model, hw, work, batch
        self.phase: Phase = phase
        self._known: dict[Capacity, tuple[int, ...]] = {}
        self._frames: dict[tuple[Capacity, int, int], int] = {}

    def host_bytes(self, s: Strategies) -> np.ndarray:
        """Host memory of each strategy, shape [strategies]."""

        def of(B: float, omega: float) -> int:
            least = Strategy(B=int(B), b_a=1, b_e=1, omega=float(omega))
            return host_bytes(self.model, least, self.work, self.phase, self.batch)

        values, which = Groups()((s.B, s.omega), of)
        return np.array(values, dtype=np.int64)[which]

    def gpu_bytes(self, s: Strategies) -> np.ndarray:
        """GPU memory of each strategy, shape [strategies]."""
        kept = Kept.of(self.model, s.s_params)
        return self._total(self._beside(s, kept), kept.packed_bytes)

    def with_most_params(self, s: Strategies) -> tuple[Strategies, np.ndarray]:
        """The same with as many resident weights as the rest leaves room for.

        Returns
        -------
        Strategies
        ndarray of int, shape [strategies]
            GPU memory of each, at most; of one that does not fit without resident weights, that.
        """
        none = np.zeros_like(s.B)
        beside = self._beside(s, Kept.of(self.model, none))
        without = self._total(beside, none)
        # A block is rounded up as it is taken: there is room for what is left less that.
        rounding = reserved_bytes(1) if self._allocates else 0
        room = np.maximum(0, self.hw.gpu_memory_bytes - without - rounding).astype(np.int64)
        s_params = Kept.most(self.model, room)
        with_ = self._total(beside, Kept.of(self.model, s_params).packed_bytes)
        over = with_ > self.hw.gpu_memory_bytes  # a small block has a large segment to itself
        return s.with_(s_params=np.where(over, 0, s_params)), np.where(over, without, with_)

    @property
    def _allocates(self) -> bool:
        return self.hw.gpu_workspace_bytes is not None

    def _beside(self, s: Strategies, kept: Kept) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of the rings' block and of the working memory."""
        groups = Groups()
        capacities, which = groups((s.B, s.b_a, s.omega), self._capacity)
        # What the GPU holds does not depend on the rows that the CPU attends to.
        on_gpu = [_on_gpu(c) for c in capacities]
        index = {c: i for i, c in enumerate(dict.fromkeys(on_gpu))}
        which = np.array([index[c] for c in on_gpu])[which]
        distinct = list(index)

        def of(i: float, b_e: float, group: float) -> tuple[int, ...]:
            kv, dense, expert, others, kept = self._held(c := distinct[int(i)])
            frame = self._frame(c, int(b_e), int(group))
            return kv, dense, int(group) * expert, others, kept + frame

        values, which = groups((which, s.b_e, s.expert_group), of)
        kv, dense, expert, others, working = np.array(values, dtype=np.int64)[which].T
        slots, dense_slots = weight_slots(self.model, s, kept)
        rings = others + aligned(s.kv_slots * kv, dense_slots * dense, slots * expert)
        return rings, working

    def _held(self, c: Capacity) -> tuple[int, ...]:
        """Bytes of a slot for KV, dense weights, one expert; of other rings; of what is kept."""
        if c not in self._known:
            least = Strategy(1, 1, 1, kv_slots=1, dense_slots=1)
            sizes = BufferSizes(self.model, least, self.phase, c)
            # Of these three each is one tensor, and each has one slot here.
            rings = ("kv", "dense_weights", "expert_weights")
            passing = [sizes.slot_bytes(ring) for ring in rings]
            slots = zip(passing, rings, strict=True)
            others = sizes.block_bytes - sum(aligned(n * sizes.slots(x)) for n, x in slots)
            kept = sum(kept_bytes(self.model, self.phase, c).values())
            self._known[c] = *passing, others, kept
        return self._known[c]

    def _frame(self, c: Capacity, b_e: int, group: int) -> int:
        key = c, min(b_e, c.tokens * group), group
        if key not in self._frames:
            s = Strategy(1, 1, b_e, expert_group=group)
            self._frames[key] = largest_frame(self.model, s, self.phase, c).bytes
        return self._frames[key]

    def _capacity(self, B: float, b_a: float, omega: float) -> Capacity:
        s = Strategy(B=int(B), b_a=int(b_a), b_e=1, omega=float(omega))
        return Capacity.worst(s, self.work, self.phase, self.batch)

    def _total(self, beside: tuple[np.ndarray, np.ndarray], packed: np.ndarray) -> np.ndarray:
        head = np.full(packed.shape, self.model.head_bytes)
        blocks = np.stack([head, packed, *beside])
        workspace = self.hw.gpu_workspace_bytes
        if workspace is None:
            return blocks.sum(axis=0)
        libraries = library_bytes(self.model, workspace) + SMALL_BYTES
        return libraries + reserved_bytes(blocks).sum(axis=0)


def weight_slots(model: ModelSpec, s: Strategies, kept: Kept) -> tuple[np.ndarray, np.ndarray]:
    """Slots of experts and of dense weights, as `moegen.graph.residency.ring_slots` has them."""
    wanted = np.maximum(1, s.s_expert // np.maximum(1, model.expert_bytes * s.expert_group))
    slots = np.minimum(wanted, passing_groups(model, s, kept))
    return slots, np.minimum(s.dense_slots, model.n_layers - kept.n_dense)


def passing_groups(model: ModelSpec, s: Strategies, kept: Kept) -> np.ndarray:
    """Groups of experts that are copied, of all layers; shape [strategies]."""
    if not model.moe_layers:
        return np.zeros_like(s.B)
    layers, n = model.n_moe_layers, model.layers[model.moe_layers[0]].n_experts
    few, more = np.divmod(kept.n_experts, layers)
    of_few, of_more = (-(-(n - k) // s.expert_group) for k in (few, few + 1))
    return (layers - more) * of_few + more * np.maximum(0, of_more)


def _on_gpu(c: Capacity) -> Capacity:
    return Capacity(
        c.rows, c.tokens, c.staged_tokens, c.slot_tokens, part_rows=c.part_rows, longest=c.longest
    )


class Groups:
    """Rows of columns that are alike, found once for each column however often it is asked for."""

    def __init__(self) -> None:
        self._codes: dict[int, tuple[np.ndarray, np.ndarray, int]] = {}

    def __call__(
        self, columns: Sequence[np.ndarray], of: Callable[..., Any]
    ) -> tuple[list[Any], np.ndarray]:
        """``of`` each distinct row of some columns, and which of them belongs to each row."""
        code, size = np.zeros(len(columns[0]), dtype=np.int64), 1
        for column in columns:
            index, n = self._code(column)
            code, size = code * n + index, size * n
            if size > 8 * len(code) + 1024:
                values, code = np.unique(code, return_inverse=True)
                size = len(values)
        first = np.full(size, -1, dtype=np.int64)
        first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
        there = first >= 0
        which = (np.cumsum(there) - 1)[code]
        return [of(*(column[i] for column in columns)) for i in first[there]], which

    def _code(self, column: np.ndarray) -> tuple[np.ndarray, int]:
        if id(column) not in self._codes:
            values, index = np.unique(column, return_inverse=True)
            # The column is kept, so that its id stays its own.
            self._codes[id(column)] = column, index, len(values)
        _, index, n = self._codes[id(column)]
        return index, n
