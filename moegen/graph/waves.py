"""How a batch of prompts is cut into waves, and a wave into micro-batches, balanced by tokens.

The executor, the ledger and the estimate of a job all take it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moegen.graph.strategy import Strategy
from moegen.graph.workload import Workload


@dataclass(frozen=True)
class Room:
    """What no wave of a job exceeds.

    Attributes
    ----------
    rows, tokens : int
        Of a wave.
    part_rows, part_tokens : int
        Of a micro-batch.
    """

    rows: int
    tokens: int
    part_rows: int
    part_tokens: int


@dataclass(frozen=True, eq=False)
class Waves:
    """A batch dealt out to waves of one layout.

    Attributes
    ----------
    rows : ndarray of int64, shape [waves, places]
        The row of the batch at each place, -1 where none is. No place of the first wave is
        empty.
    part_rows : int
        Rows of a micro-batch at most: the b_a to build the waves' graph with.
    """

    rows: np.ndarray
    part_rows: int

    def lengths(self, of_rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens at each place, shape [waves, places]; 0 where no row is."""
        return np.where(self.rows < 0, 0, np.asarray(of_rows, dtype=np.int64)[self.rows])


def even(n: int, parts: int) -> list[int]:
    """``n`` rows in so many parts, alike but for one row, the larger parts first."""
    return [n // parts + (i < n % parts) for i in range(parts)]


def room(s: Strategy, work: Workload, batch: int) -> Room:
    """What the waves of any ``batch`` rows of a workload need, and of any fewer.

    Parameters
    ----------
    s : Strategy
        Prefill's: at most ``B`` rows a wave and ``b_a`` a micro-batch.
    batch : int
        Rows that are prefilled before decode begins: decode's B.

    Notes
    -----
    That is what the longest rows give. Dealing follows ranks by length alone, so the r-th
    longest row of a batch lies where the r-th longest of all would, and no sum grows when
    rows are replaced by shorter ones.
    """
    return _room(s.B, s.b_a, work, batch)


@lru_cache(maxsize=256)
def _room(B: int, b_a: int, work: Workload, batch: int) -> Room:
    lengths = _longest_prompts(work, batch)
    n = len(lengths)
    waves = -(-n // B)
    rows = -(-n // waves)
    parts = -(-rows // b_a)
    loads = _loads(lengths, waves, parts)
    return Room(rows, int(loads.sum(1).max()), -(-rows // parts), int(loads.max()))


def deal(lengths: Sequence[int] | np.ndarray, room: Room) -> Waves:
    """Deal a batch's rows out to as few waves and micro-batches as there is room for.

    Rows go by length, longest first, to wave 1, 2, ..., w, w, ..., 2, 1, 1, 2, ...; and those of
    a wave to its micro-batches likewise. Each then has rows of all ranks, so that not only
    tokens are alike but also what grows with their square, as attention does. The heaviest wave
    is within about 1% of the mean for lengths spread evenly over a scale of three decades, and
    never more than the longest row above the lightest; a greedy choice of the lightest wave
    would be nearer still, but what it gives has no bound that can be known before rows come.

    Parameters
    ----------
    lengths : sequence of int, shape [rows]
        Tokens of each prompt.
    room : Room
        Of a workload that the rows are part of. A batch of few rows may be of the longest
        alone: it then has fewer rows a wave.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    n = len(lengths)
    order = np.argsort(-lengths, kind="stable")
    ranked = lengths[order]
    waves = -(-n // room.rows)
    while waves < n and _loads(ranked, waves, 1).max() > room.tokens:
        waves += 1
    rows = -(-n // waves)
    part_rows = min(room.part_rows, rows)
    while part_rows > 1 and _loads(ranked, waves, -(-rows // part_rows)).max() > room.part_tokens:
        part_rows -= 1
    parts = -(-rows // part_rows)
    wave, part, turn = _places(n, waves, parts)
    first = np.cumsum([0, *even(rows, parts)])
    places = np.full((waves, rows), -1, dtype=np.int64)
    places[wave, first[part] + turn] = order
    return Waves(places, part_rows)


def _longest_prompts(work: Workload, n: int) -> np.ndarray:
    """Tokens of the ``n`` longest prompts, longest first; of all if there are fewer."""
    prompts, _, counts = np.array(work.groups[::-1], dtype=np.int64).T
    before = np.cumsum(counts) - counts
    return np.repeat(prompts, np.clip(n - before, 0, counts))


def _loads(ranked: np.ndarray, waves: int, parts: int) -> np.ndarray:
    """Tokens of each micro-batch, shape [waves, parts], of lengths by rank."""
    wave, part, _ = _places(len(ranked), waves, parts)
    loads = np.zeros((waves, parts), dtype=np.int64)
    np.add.at(loads, (wave, part), ranked)
    return loads


def _places(n: int, waves: int, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Wave, micro-batch and place in it of the row of each rank."""
    turn, wave = _back_and_forth(np.arange(n), n, waves)
    turn, part = _back_and_forth(turn, -(-n // waves), parts)
    return wave, part, turn


def _back_and_forth(rank: np.ndarray, n: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn and bin of each rank. The last turn goes forth: the first bins are the fullest."""
    turn, at = np.divmod(rank, bins)
    back = (turn - n // bins) % 2 == 1
    return turn, np.where(back, bins - 1 - at, at)
