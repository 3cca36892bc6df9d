"""The only byte accounting: Eq. 2 (host) and Eq. 3 (GPU) of MoE-Gen as a ledger, line by line.

A ledger is an upper bound on what a run holds, whatever the order of its rows: buffers by
`moegen.graph.sizes`, what ops work in by `moegen.graph.working`, what the GPU's allocator and
libraries add by `moegen.graph.allocator`. The CUDA context, with the code of kernels, is
outside: it lies in no process's allocator. So are copies of logits that someone asks to keep.
"""

from __future__ import annotations

import html
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from moegen.errors import Infeasible, InvalidInput
from moegen.graph.allocator import SMALL_BYTES, library_bytes, reserved_bytes
from moegen.graph.bisect import greatest
from moegen.graph.hardware import HardwareSpec
from moegen.graph.model import ModelSpec, Phase
from moegen.graph.residency import Residency, residency, ring_slots
from moegen.graph.sizes import (
    BufferSizes,
    Capacity,
    aligned,
    blob_bytes,
    packed_bytes,
)
from moegen.graph.strategy import Strategy
from moegen.graph.working import kept_bytes, largest_frame
from moegen.graph.workload import Workload
from moegen.units import GIB, format_bytes

__all__ = [
    "Ledger", "Line", "Residency", "Section", "max_batch_eq2", "memory", "residency", "ring_slots",
]  # fmt: skip

# Rows beyond so many tokens are cut into stretches by the CPU's attention, which keeps what each
# comes to until they are added up (moegen/exec/kernels/cpu_attention.cpp).
CPU_STRETCH_TOKENS, CPU_MOST_STRETCHES = 1024, 64

# What makes each line smaller, for the error message.
_REMEDY = {
    "weights": "a smaller model or dtype, or more host memory",
    "KV store": "a smaller B",
    "weights as packed": "more host memory",
    "this process": "more host memory",
    "queries and outputs staged": "a smaller B or omega",
    "attention on the CPU": "a smaller B or omega",
    "resident weights": "a smaller s_params",
    "embedding and output matrix": "a GPU with more memory",
    "expert slots": "a smaller s_expert or expert_group",
    "dense slots": "fewer dense_slots",
    "KV slots": "a smaller b_a or fewer kv_slots",
    "row table": "a smaller B",
    "row table in the making": "a smaller B",
    "hidden states": "a smaller B",
    "positions": "a smaller B",
    "queries, keys and values": "a smaller B (decode) or b_a (prefill)",
    "attention output": "a smaller B (decode) or b_a (prefill)",
    "routing": "a smaller B",
    "outputs by expert": "a smaller B",
    "shared experts' output": "a smaller B",
    "logits": "a smaller B",
    "temporaries": "a smaller b_e, b_a (prefill) or B",
    "libraries": "a GPU with more memory",
    "allocator": "a GPU with more memory",
}
# Lines of what a GPU reaches in host memory.
_PINNED = {
    "weights", "weights as packed", "KV store", "queries and outputs staged", "row table"
}  # fmt: skip
# Lines that no strategy changes.
_FIXED = {
    "weights", "weights as packed", "embedding and output matrix", "this process", "libraries",
    "allocator",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One entry: what, how many bytes, and how they come about.

    ``pinned`` host memory is registered with the CUDA driver, if there is a GPU.
    """

    name: str
    bytes: int
    detail: str
    pinned: bool = False


@dataclass(frozen=True)
class Section:
    """One memory: its capacity and what is put there."""

    name: str
    capacity_bytes: int
    lines: tuple[Line, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes asked for."""
        return sum(line.bytes for line in self.lines)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned for a GPU to reach."""
        return sum(line.bytes for line in self.lines if line.pinned)

    @property
    def free_bytes(self) -> int:
        """Bytes left; negative if it does not fit."""
        return self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.free_bytes >= 0

    @property
    def blamed(self) -> Line:
        """The biggest line that a strategy can change; one that none can if those are too much."""
        fixed = [x for x in self.lines if x.name in _FIXED]
        if sum(x.bytes for x in fixed) > self.capacity_bytes:
            return fixed[0]
        return max((x for x in self.lines if x not in fixed), key=lambda line: line.bytes)

    def require(self) -> None:
        """Raise Infeasible unless it fits."""
        if self.fits:
            return
        biggest = sorted(self.lines, key=lambda line: line.bytes, reverse=True)
        listed = ", ".join(f"{x.name} {format_bytes(x.bytes)}" for x in biggest[:3])
        raise Infeasible(
            f"does not fit {self.name} memory: needs {format_bytes(self.total_bytes)} of "
            f"{format_bytes(self.capacity_bytes)}, {format_bytes(-self.free_bytes)} too much; "
            f"biggest are {listed}. Try {_REMEDY[self.blamed.name]}",
            line=self.name,
            limit_bytes=self.capacity_bytes,
            need_bytes=self.total_bytes,
        )


@dataclass(frozen=True, repr=False)
class Ledger:
    """Host and GPU memory of one strategy, line by line."""

    title: str
    host: Section
    gpu: Section

    @property
    def fits(self) -> bool:
        """Whether both sections fit."""
        return self.host.fits and self.gpu.fits

    def require(self) -> Ledger:
        """This ledger if it fits.

        Raises
        ------
        Infeasible
            Naming the section, its biggest lines, the limit, the shortfall and a remedy.
        """
        self.host.require()
        self.gpu.require()
        return self

    def beside(self, name: str, n_bytes: int, detail: str) -> Ledger:
        """The same with something more in host memory, and as much more of that memory.

        For what the process holds already where the capacity was what is free beside it.
        """
        if not n_bytes:
            return self
        host = replace(
            self.host,
            capacity_bytes=self.host.capacity_bytes + n_bytes,
            lines=(*self.host.lines, Line(name, n_bytes, detail)),
        )
        return replace(self, host=host)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "title": self.title,
            "fits": self.fits,
            **{
                s.name: {
                    "capacity_bytes": s.capacity_bytes,
                    "total_bytes": s.total_bytes,
                    "free_bytes": s.free_bytes,
                    "lines": [vars(line) for line in s.lines],
                }
                for s in (self.host, self.gpu)
            },
        }

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = []
        for eq, s in (("Eq. 2", self.host), ("Eq. 3", self.gpu)):
            rows.append((f"{s.name} ({eq})", "GiB", ""))
            rows += [(f"  {x.name}", f"{x.bytes / GIB:.3f}", x.detail) for x in s.lines]
            left = "free" if s.fits else "MISSING"
            rows.append(
                ("  total", f"{s.total_bytes / GIB:.3f}", f"of {s.capacity_bytes / GIB:.3f}")
            )
            rows.append((f"  {left}", f"{abs(s.free_bytes) / GIB:.3f}", ""))
        return rows

    def __repr__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{name:<{width}}  {size:>9}  {detail}".rstrip() for name, size, detail in rows]
        return "\n".join([f"Ledger {self.title}", *lines])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td style='text-align:left;white-space:pre'>{html.escape(name)}</td>"
            f"<td>{size}</td>"
            f"<td style='text-align:left'>{html.escape(detail)}</td></tr>"
            for name, size, detail in self._rows()
        )
        return f"<table><caption>{html.escape(self.title)}</caption>{cells}</table>"


def memory(
    model: ModelSpec,
    hw: HardwareSpec,
    s: Strategy,
    work: Workload,
    *,
    phase: Phase = "decode",
    batch: int | None = None,
) -> Ledger:
    """What a strategy puts into host and GPU memory.

    Parameters
    ----------
    phase : {"decode", "prefill"}
        The phase ``s`` is for. Rows are counted at the lengths of the longest B rows of the
        workload (b_a for a micro-batch), and as many on the CPU, and on the GPU, as any
        order of the rows leads to.
    batch : int, optional
        Prefill: rows that are dealt out to waves together, which is decode's B. Unless given
        a wave is taken to be the longest B rows themselves.

    Returns
    -------
    Ledger
        Whether or not it fits; :meth:`Ledger.require` raises where it does not.

    Notes
    -----
    Eq. 2: S_KV-CPU(B) + S_Model <= m_c.
    Eq. 3: S_Params + S_Expert + S_Dense + S_KV-GPU(b_a) + S_IS(B, b_a, b_e) <= m_g.
    """
    if phase not in ("decode", "prefill"):
        raise InvalidInput(f'phase must be "decode" or "prefill", got {phase!r}')
    need = _Need(model, s, work, phase, batch)
    return Ledger(
        f"{model.name} on {hw.name}, {phase}, B={s.B}",
        Section("host", int(hw.host_memory_bytes), _lines(need.host(), _PINNED)),
        Section("gpu", int(hw.gpu_memory_bytes), _lines(need.gpu(hw.gpu_workspace_bytes))),
    )


def host_bytes(
    model: ModelSpec, s: Strategy, work: Workload, phase: Phase = "decode", batch: int | None = None
) -> int:
    """What a strategy puts into host memory: the sum of that section of :func:`memory`."""
    return sum(nbytes for _, nbytes, _ in _Need(model, s, work, phase, batch).host())


def max_batch_eq2(model: ModelSpec, hw: HardwareSpec, work: Workload) -> int:
    """The most sequences whose KV fits beside the weights in host memory: Eq. 2 alone.

    The longest rows of the workload first; 0 if the weights alone do not fit.
    """
    tokens = (int(hw.host_memory_bytes) - model.weight_bytes) // model.kv_bytes_per_token
    # A row has at least one token.
    return greatest(0, max(0, tokens), lambda rows: work.longest(rows) <= tokens)


def cpu_stretches(tokens: int) -> int:
    """Stretches at most that the CPU's attention cuts a row of so many tokens, or fewer, into."""
    return min(CPU_MOST_STRETCHES, -(-tokens // CPU_STRETCH_TOKENS))


def _lines(entries: list[tuple[str, int, str]], pinned: Collection[str] = ()) -> tuple[Line, ...]:
    return tuple(Line(*entry, pinned=entry[0] in pinned) for entry in entries if entry[1])


class _Need:
    """The quantities that the lines of a ledger are made of."""

    def __init__(
        self, model: ModelSpec, s: Strategy, work: Workload, phase: Phase, batch: int | None
    ) -> None:
        self.model, self.s = model, s
        self.phase: Phase = phase
        self.kept = residency(model, s.s_params)
        self.store_tokens = work.longest(s.B)
        self.most = Capacity.worst(s, work, phase, batch)
        self.sizes = BufferSizes(model, s, phase, self.most)

    def host(self) -> list[tuple[str, int, str]]:
        m, a, rows, sizes = self.model, self.model.act_bytes, self.most.cpu_rows, self.sizes
        packed, staged = packed_bytes(m), sizes.ring_bytes("host_qkv", "host_attn")
        return [
            ("weights", m.weight_bytes, f"{m.n_params / 1e9:.3f} B parameters"),
            ("weights as packed", packed - m.weight_bytes, "float32 routers, alignment"),
            (
                "KV store",
                self.store_tokens * m.kv_bytes_per_token,
                f"{self.s.B} rows, {self.store_tokens} tokens of {m.kv_bytes_per_token} B",
            ),
            (
                "queries and outputs staged",
                staged,
                f"{rows} rows that the CPU attends to",
            ),
            (
                "attention on the CPU",
                # As torch makes it, or as the compiled kernel does: which runs is not known here.
                max(rows * (sizes.q + 2 * sizes.out) * a, self._stretches_bytes()),
                f"{rows} rows, as each thread leaves them and together",
            ),
            (
                "row table",
                sizes.host_block_bytes - staged,
                f"{self.most.rows} rows; counts by expert, tokens; alignment",
            ),
            ("row table in the making", sizes.slot_bytes("rows"), f"{self.most.rows} rows"),
        ]

    def _stretches_bytes(self) -> int:
        """What the compiled kernel keeps of rows that are cut: float32 sums, by head."""
        most = 0
        for x in (layer.attention for layer in self.model.layers):
            n = cpu_stretches(x.kv_span(self.most.longest))
            if n > 1:
                # A row is cut where it is longer than a stretch, so that all rows together give
                # no more than two for each stretch that their tokens fill.
                n = min(self.most.cpu_rows * n, 2 * self.store_tokens // CPU_STRETCH_TOKENS)
                most = max(most, n * 4 * (x.out_width(self.phase) + 2 * x.n_heads))
        return most

    def gpu(self, workspace_bytes: float | None) -> list[tuple[str, int, str]]:
        m, s, kept, sizes, most = self.model, self.s, self.kept, self.sizes, self.most
        packed = sum(
            aligned(resident * dense, n * expert)
            for dense, expert, resident, n in zip(
                *blob_bytes(m), kept.dense, kept.experts, strict=True
            )
        )
        own, frame = kept_bytes(m, self.phase, most), largest_frame(m, s, self.phase, most)
        tokens, staged = most.tokens, most.staged_tokens
        top_k = max(x.top_k for x in m.layers)
        # What is asked of the allocator, block by block, and what it takes for that.
        rings = sizes.block_bytes
        blocks = (m.head_bytes, packed, rings, sum(own.values()) + frame.bytes)
        in_slots = sizes.ring_bytes(
            *(name for name, ring in sizes.rings.items() if ring[2] == "gpu")
        )
        libraries, taken = 0, sum(blocks)
        if workspace_bytes is not None:
            libraries = library_bytes(m, workspace_bytes)
            taken = sum(map(reserved_bytes, blocks)) + SMALL_BYTES

        def slots(ring: str, name: str) -> str:
            n = sizes.slots(ring)
            return f"{n} of {format_bytes(sizes.slot_bytes(ring))} ({name})"

        return [
            (
                "resident weights",
                packed,
                f"{sum(kept.dense)} dense blobs, {sum(kept.experts)} experts (S_Params)",
            ),
            ("embedding and output matrix", m.head_bytes, "always on the GPU"),
            (
                "expert slots",
                sizes.ring_bytes("expert_weights"),
                slots("expert_weights", "S_Expert"),
            ),
            ("dense slots", sizes.ring_bytes("dense_weights"), slots("dense_weights", "S_Dense")),
            (
                "KV slots",
                sizes.ring_bytes("kv"),
                f"{sizes.slots('kv')} of {most.part_rows} rows, one layer (S_KV-GPU)",
            ),
            (
                "row table",
                sizes.ring_bytes("rows", "counts", "tokens"),
                f"{most.rows} rows; counts by expert, tokens",
            ),
            ("hidden states", own["hidden states"], f"{tokens} tokens: residual and normed"),
            ("positions", own["positions"], f"{tokens} tokens: rotary angles"),
            ("queries, keys and values", sizes.ring_bytes("qkv"), f"2 of {staged} tokens"),
            ("attention output", sizes.ring_bytes("attn_out"), f"{staged} tokens"),
            ("routing", own.get("routing", 0), f"{tokens} x {top_k} choices, sorted"),
            ("outputs by expert", own.get("outputs by expert", 0), f"{tokens} x {top_k}"),
            ("shared experts' output", own.get("shared experts' output", 0), f"{tokens} tokens"),
            ("logits", sizes.ring_bytes("logits"), f"{most.rows} rows"),
            (
                "temporaries",
                frame.bytes,
                f"{frame.op} takes most: {frame.n} {_UNIT.get(frame.op, 'tokens')} at once",
            ),
            ("libraries", libraries, "workspaces for products of matrices"),
            ("allocator", taken - sum(blocks) + rings - in_slots, "rounding of all this"),
        ]


# Ops that work on rows.
_UNIT = {"attn_gpu": "rows", "lm_head": "rows"}
