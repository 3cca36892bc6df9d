"""How the rows of a job go through batches and layouts: what the executor does, on arrays alone.

A round is rows that are prefilled together, and the layouts that are decoded until the next
rows are prefilled: see `moegen.exec.generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import MOST, wholes
from moegen.graph.quantiles import mixed
from moegen.graph.shape import Shape
from moegen.graph.strategy import BARRIER_SHARE
from moegen.graph.workload import Workload

# Of a job of more batches so many are looked at, evenly spread; they stand for the others.
MOST_BATCHES = 256

Lengths = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows in the order in which batches take them.

    Parameters
    ----------
    prompt, gen : ndarray of int64, shape [rows]
        Tokens of each prompt, and tokens to generate for it.
    """

    prompt: np.ndarray
    gen: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, which: slice | np.ndarray) -> Rows:
        return Rows(self.prompt[which], self.gen[which])

    def __add__(self, more: Rows) -> Rows:
        return Rows(
            np.concatenate([self.prompt, more.prompt]), np.concatenate([self.gen, more.gen])
        )


@dataclass(frozen=True, eq=False)
class Queue:
    """What a job has to answer, batch by batch.

    Attributes
    ----------
    n, prompt_tokens, gen_tokens : int
        Of all rows.
    prompts : Workload or None
        The histogram of all prompts, with or without their generations; None of no row.
    B : int
        Rows of a batch.
    rows : Rows
        Those of the batches that are looked at: all, or ``MOST_BATCHES`` full ones and the last.
    """

    n: int
    prompt_tokens: int
    gen_tokens: int
    prompts: Workload | None
    B: int
    rows: Rows

    @classmethod
    def of(cls, work: Workload | tuple[Lengths, Lengths], B: int) -> Queue:
        """Rows of a pair come as they are; those of a histogram, whose order is unknown, mixed.

        Any run of mixed rows has lengths as the whole has, so that batches are alike.

        Raises
        ------
        InvalidInput
            If the lengths of a pair are not equally many, or one is no whole number of at
            least 1.
        """
        if isinstance(work, Workload):
            looked_at = min(work.n // B, MOST_BATCHES) * B + work.n % B
            rows = _mixed(work, looked_at)
            return cls(work.n, work.prompt_tokens, work.gen_tokens, work, B, rows)
        prompts, gens = (
            wholes(lengths, name, at_least=1, at_most=MOST)
            for lengths, name in zip(work, ("prompt_lens", "gen_lens"), strict=True)
        )
        if len(prompts) != len(gens):
            raise InvalidInput(
                f"prompt_lens and gen_lens must be equally long, got {len(prompts)} and {len(gens)}"
            )
        rows = Rows(np.array(prompts, dtype=np.int64), np.array(gens, dtype=np.int64))
        lengths, counts = np.unique(rows.prompt, return_counts=True)
        groups = tuple((p, 1, n) for p, n in zip(lengths.tolist(), counts.tolist(), strict=True))
        histogram = Workload(groups) if groups else None
        n, full = len(rows), len(rows) // B
        if full > MOST_BATCHES:
            some = np.linspace(0, full - 1, MOST_BATCHES).round().astype(int)
            kept = (some[:, None] * B + np.arange(B)).ravel()
            rows = rows[kept] + rows[full * B :]
        return cls(n, sum(prompts), sum(gens), histogram, B, rows)

    @property
    def stands_for(self) -> float:
        """For how many full batches each of those that are looked at stands."""
        return (self.n // self.B) / max(1, len(self.rows) // self.B)


def _mixed(work: Workload, n: int) -> Rows:
    """``n`` rows of a histogram, all or evenly spread over it, mixed."""
    prompts, gens, counts = np.array(work.groups, dtype=np.int64).T
    ranks = ((np.arange(n) + 0.5) * (work.n / n)).astype(np.int64)
    group = np.searchsorted(np.cumsum(counts), ranks, side="right")
    group = mixed(group)
    return Rows(prompts[group], gens[group])


@dataclass(frozen=True, eq=False)
class Layout:
    """A run of decode steps with one structure, from one barrier to the next.

    Parameters
    ----------
    past : ndarray of int64, shape [rows]
        Tokens each row has in the KV store before the first step.
    left : ndarray of int64, shape [rows]
        Tokens each row still generates, at least 1.
    """

    past: np.ndarray
    left: np.ndarray

    def __len__(self) -> int:
        return len(self.left)

    @cached_property
    def steps(self) -> int:
        """It goes on while more than ``BARRIER_SHARE`` of its rows do."""
        tips = min(int(BARRIER_SHARE * len(self)), len(self) - 1)  # the row that tips the scale
        return int(np.partition(self.left, len(self) - 1 - tips)[len(self) - 1 - tips])

    @cached_property
    def _ended(self) -> np.ndarray:
        """How many rows have ended before each step, shape [steps]."""
        return np.searchsorted(np.sort(self.left), np.arange(self.steps), side="right")

    @property
    def live(self) -> np.ndarray:
        """Rows of each step, shape [steps]."""
        return len(self) - self._ended

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens that are attended to in each step, shape [steps]."""
        past = self.past[np.argsort(self.left, kind="stable")]
        of_ended = np.concatenate([[0], np.cumsum(past)])[self._ended]
        return past.sum() - of_ended + self.live * (np.arange(self.steps) + 1)

    def shape(self, step: int) -> Shape:
        """What a step works on."""
        live = self.left > step
        past = np.where(live, self.past + step, 0)
        return Shape(tuple(past.tolist()), tuple(live.astype(int).tolist()))

    def rest(self) -> Rows:
        """The rows that go on after it: what they have, and what they still generate."""
        goes_on = self.left > self.steps
        return Rows(self.past[goes_on] + self.steps, self.left[goes_on] - self.steps)


@dataclass(frozen=True, eq=False)
class Round:
    """Rows that are prefilled together, and the layouts that are decoded after that.

    Attributes
    ----------
    prompts : ndarray of int64, shape [rows]
    layouts : list of Layout
    """

    prompts: np.ndarray
    layouts: list[Layout]


@dataclass(frozen=True, eq=False)
class Course:
    """The rounds of a job.

    Attributes
    ----------
    rounds : list of Round
        Each different one.
    order : list of (int, float)
        Positions in ``rounds`` as they come, and for how many rounds each stands: 1, but in
        jobs of more than ``MOST_BATCHES`` batches.
    """

    rounds: list[Round]
    order: list[tuple[int, float]]

    @cached_property
    def times(self) -> np.ndarray:
        """How often each of ``rounds`` comes, shape [rounds]."""
        times = np.zeros(len(self.rounds))
        for i, n in self.order:
            times[i] += n
        return times


def course(queue: Queue, refill: bool) -> Course:
    """The rounds that a job goes through.

    Parameters
    ----------
    refill : bool
        Whether places of rows that have ended are given to the next rows at each barrier;
        otherwise, as the executor does, once all rows of a batch have ended.
    """
    rows, B = queue.rows, queue.B
    if refill:
        refilled = list(_refilled(rows, B))
        return Course(refilled, [(i, queue.n / len(rows)) for i in range(len(refilled))])
    at: dict[bytes, int] = {}
    found, order = [], []
    for start in range(0, len(rows), B):
        batch = rows[start : start + B]
        key = batch.prompt.tobytes() + batch.gen.tobytes()
        if key not in at:
            at[key] = len(found)
            found.append(Round(batch.prompt, list(_layouts(_prefilled(batch)))))
        order.append((at[key], queue.stands_for if len(batch) == B else 1.0))
    return Course(found, order)


def _prefilled(batch: Rows) -> Rows:
    """Rows that go on once prefill has given each its first token."""
    goes_on = batch.gen > 1
    return Rows(batch.prompt[goes_on], batch.gen[goes_on] - 1)


def _layouts(live: Rows) -> Iterator[Layout]:
    while len(live):
        layout = Layout(live.prompt, live.gen)
        yield layout
        live = layout.rest()


def _refilled(queue: Rows, B: int) -> Iterator[Round]:
    live, taken = queue[:0], 0
    while taken < len(queue):
        new = queue[taken : taken + B - len(live)]
        taken += len(new)
        live = live + _prefilled(new)
        if taken == len(queue):
            yield Round(new.prompt, list(_layouts(live)))
        elif len(live):
            layout = Layout(live.prompt, live.gen)
            live = layout.rest()
            yield Round(new.prompt, [layout])
        else:
            yield Round(new.prompt, [])
