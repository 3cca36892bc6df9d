"""Step: what one step works on, as host arrays and as views of the row table.

Legend: T new tokens, R live rows. Everything is compact over live rows, the CPU's rows
first, then the GPU's micro-batches, so a share of the batch is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from moegen.graph.shape import Shape
from moegen.graph.task import Layout


@dataclass(frozen=True)
class Row:
    """A live row at one step.

    Attributes
    ----------
    start : int
        The row's first token in the KV store.
    past : int
        Tokens it has there.
    ids : sequence of int
        The tokens this step adds: the prompt, or the last sampled one.
    """

    start: int
    past: int
    ids: Sequence[int]


@dataclass(frozen=True)
class Span:
    """A share of the step: rows ``[r0, r1)``, their tokens ``[t0, t1)``, longest context."""

    r0: int
    r1: int
    t0: int
    t1: int
    max_length: int

    @property
    def rows(self) -> int:
        return self.r1 - self.r0

    @property
    def tokens(self) -> int:
        return self.t1 - self.t0


# The row table's columns, in order: by token, then by row.
TOKEN_COLUMNS = ("ids", "pos", "kv_index")
ROW_COLUMNS = ("last", "start", "past", "slot_start", "length")


class Step:
    """The rows of one step, bound before its first task is issued.

    Parameters
    ----------
    layout : Layout
    rows : sequence of Row or None
        One entry a batch position; None where the row ended.

    Attributes
    ----------
    table : torch.Tensor, int64 [3 T + 5 R]
        What `copy_rows` sends up.
    counts : dict of int to list of int
        Tokens per expert, by layer, as the host learns them.
    """

    def __init__(self, layout: Layout, rows: Sequence[Row | None]) -> None:
        self.layout = layout
        self.positions = [p for p, row in enumerate(rows) if row is not None]
        live = [row for row in rows if row is not None]
        self.rows = live
        self.counts: dict[int, list[int]] = {}
        self._places: dict[int, list[int]] = {}
        new = np.array([len(r.ids) for r in live], dtype=np.int64)
        past = np.array([r.past for r in live], dtype=np.int64)
        start = np.array([r.start for r in live], dtype=np.int64)
        self.new, self.past, self.start = new, past, start
        self.n_rows, self.n_tokens = len(live), int(new.sum())
        first = np.cumsum(new) - new
        row_of = np.repeat(np.arange(self.n_rows), new)
        pos = past[row_of] + np.arange(self.n_tokens) - first[row_of]
        length = past + new
        self.cpu, self.parts, slot_start = self._spans(length, first)
        columns = {
            "ids": np.concatenate([np.asarray(r.ids, dtype=np.int64) for r in live]),
            "pos": pos,
            "kv_index": start[row_of] + pos,
            "last": first + new - 1,
            "start": start,
            "past": past,
            "slot_start": slot_start,
            "length": length,
        }
        self.length = length
        self.table = torch.from_numpy(np.concatenate(list(columns.values())))

    def _spans(
        self, length: np.ndarray, first: np.ndarray
    ) -> tuple[Span, tuple[Span, ...], np.ndarray]:
        positions = np.array(self.positions, dtype=np.int64)
        bounds = np.cumsum([0, self.layout.cpu_rows, *self.layout.micro_batches])
        edges = np.searchsorted(positions, bounds)
        tokens = np.append(first, self.n_tokens)
        spans = []
        slot_start = np.zeros(self.n_rows, dtype=np.int64)
        for r0, r1 in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            own = length[r0:r1]
            slot_start[r0:r1] = np.cumsum(own) - own
            longest = int(own.max()) if len(own) else 0
            spans.append(Span(r0, r1, int(tokens[r0]), int(tokens[r1]), longest))
        return spans[0], tuple(spans[1:]), slot_start

    @cached_property
    def everything(self) -> Span:
        """All live rows."""
        longest = int(self.length.max()) if self.n_rows else 0
        return Span(0, self.n_rows, 0, self.n_tokens, longest)

    def span(self, microbatch: int) -> Span:
        """The share of a task: a micro-batch's, or all."""
        return self.parts[microbatch] if microbatch >= 0 else self.everything

    @property
    def gpu(self) -> Span:
        """The rows that attend on the GPU."""
        return Span(self.cpu.r1, self.n_rows, self.cpu.t1, self.n_tokens, 0)

    def places(self, layer: int) -> list[int]:
        """Where each expert's choices begin among all of ``layer``, and where the last ends."""
        if layer not in self._places:
            self._places[layer] = list(accumulate(self.counts[layer], initial=0))
        return self._places[layer]

    def forget_places(self) -> None:
        """Work out `places` anew: ``counts`` are others now."""
        self._places.clear()

    def columns(self, table: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a copy of the table, by column."""
        sizes = [self.n_tokens] * len(TOKEN_COLUMNS) + [self.n_rows] * len(ROW_COLUMNS)
        views = torch.split(table[: sum(sizes)], sizes)
        return dict(zip((*TOKEN_COLUMNS, *ROW_COLUMNS), views, strict=True))

    def shape(self) -> Shape:
        """The step's sizes, with the routing as it was."""
        past, new = [0] * self.layout.rows, [0] * self.layout.rows
        for p, r in zip(self.positions, self.rows, strict=True):
            past[p], new[p] = r.past, len(r.ids)
        return Shape(tuple(past), tuple(new), {k: tuple(v) for k, v in self.counts.items()})
