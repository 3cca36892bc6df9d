"""Workload: how many rows of which prompt and generation length."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moegen.errors import InvalidInput
from moegen.graph.checks import MOST, whole
from moegen.graph.quantiles import lognormal, mixed
from moegen.graph.requests import read_requests

PRESETS = Path(__file__).parent.parent / "data" / "workloads.yaml"


class RunningSums:
    """Tokens of the first rows of groups in some order, found by halving.

    Python's numbers, not an array's: products of lengths and counts may pass 64 bits.

    Parameters
    ----------
    groups : iterable of (length, rows)
        In the order in which rows are taken.
    start : int or float
        Zero of the kind that sums are to be. Floats are added in the order of the groups.

    Attributes
    ----------
    rows : int
        Of all groups.
    tokens : int or float
        Of all groups.
    """

    def __init__(self, groups: Iterable[tuple[int, int]], start: float = 0) -> None:
        self._groups = list(groups)
        self._rows = list(accumulate((n for _, n in self._groups), initial=0))
        sizes = (length * n for length, n in self._groups)
        self._tokens: list[Any] = list(accumulate(sizes, initial=start))
        self.rows, self.tokens = self._rows[-1], self._tokens[-1]

    def first(self, rows: int) -> Any:
        """Tokens of the first ``rows`` rows; of all if there are fewer."""
        if rows >= self.rows:
            return self.tokens
        i = bisect_right(self._rows, rows) - 1
        return self._tokens[i] + (rows - self._rows[i]) * self._groups[i][0]


@dataclass(frozen=True)
class Workload:
    """A histogram of lengths.

    Parameters
    ----------
    groups : tuple of (prompt_len, gen_len, count)
        Tokens of prompt and of generation, and how many rows have just these.
    name : str
        For people.

    Raises
    ------
    InvalidInput
        If there is no group, or a number is not a whole number of at least 1.
    """

    groups: tuple[tuple[int, int, int], ...]
    name: str = "workload"

    def __post_init__(self) -> None:
        merged: Counter[tuple[int, int]] = Counter()
        if not isinstance(self.groups, (tuple, list)):
            raise InvalidInput(f"groups must be a tuple of groups, got {self.groups!r}")
        for group in self.groups:
            if not isinstance(group, (tuple, list)) or len(group) != 3:
                raise InvalidInput(f"a group is (prompt_len, gen_len, count), got {group!r}")
            prompt, gen, count = (
                whole(value, what, at_least=1, at_most=MOST)
                for what, value in zip(("prompt_len", "gen_len", "n"), group, strict=True)
            )
            merged[prompt, gen] += count
        if not merged:
            raise InvalidInput(f"{self.name} has no rows")
        groups = tuple((p, g, n) for (p, g), n in sorted(merged.items()))
        object.__setattr__(self, "groups", groups)

    @classmethod
    def uniform(cls, n: int, prompt_len: int, gen_len: int) -> Workload:
        """``n`` rows of one length."""
        return cls(((prompt_len, gen_len, n),), name=f"{n} x ({prompt_len} + {gen_len})")

    @classmethod
    def preset(cls, name: str, *, spread: bool = False) -> Workload:
        """A data set of the paper's table 4 at its mean lengths: mmlu, gsm8k, chatbot-arena.

        Parameters
        ----------
        spread : bool
            Lengths that vary around the means, by :meth:`lognormal`. How far is an assumption:
            the paper states means alone.
        """
        known = _presets()
        if name not in known:
            raise InvalidInput(f"{name!r} is no preset; presets are {', '.join(sorted(known))}")
        p = known[name]
        n, prompt_len, gen_len = p["n"], p["prompt_len"], p["gen_len"]
        if not spread:
            return cls(((prompt_len, gen_len, n),), name=name)
        sigmas = {key: p[key]["value"] for key in ("prompt_sigma", "gen_sigma")}
        return cls.lognormal(n, prompt_len, gen_len, **sigmas, name=f"{name}, spread")

    @classmethod
    def lognormal(
        cls,
        n: int,
        prompt_mean: int,
        gen_mean: int,
        *,
        prompt_sigma: float,
        gen_sigma: float,
        name: str | None = None,
    ) -> Workload:
        """Lengths whose logarithms are normally distributed, prompts apart from generations.

        They are quantiles, not drawn: the same arguments give the same histogram. Lengths lie
        5% apart, none is longer than 8 times the mean, and tokens in all are those of ``n`` rows
        of mean length.

        Parameters
        ----------
        n : int
            Rows, at most 10 million.
        prompt_mean, gen_mean : int
        prompt_sigma, gen_sigma : float
            Standard deviation of the natural logarithm, at most 1.5.

        Raises
        ------
        InvalidInput
            If a number is out of range.
        """
        n = whole(n, "n", at_least=1, at_most=10**7)
        name = name or f"{n} x log-normal ({prompt_mean} + {gen_mean})"
        prompts = lognormal(n, prompt_mean, prompt_sigma, "prompt")
        gens = mixed(lognormal(n, gen_mean, gen_sigma, "gen"))
        (ps, p), (gs, g) = (np.unique(x, return_inverse=True) for x in (prompts, gens))
        pairs, counts = np.unique(p * len(gs) + g, return_counts=True)
        of_pairs = ps[pairs // len(gs)], gs[pairs % len(gs)], counts
        return cls(tuple(zip(*(x.tolist() for x in of_pairs), strict=True)), name=name)

    @classmethod
    def from_lengths(
        cls, prompt_lens: Iterable[int], gen_lens: Iterable[int], name: str = "workload"
    ) -> Workload:
        """From one prompt and one generation length per row."""
        try:
            pairs = Counter(zip(prompt_lens, gen_lens, strict=True))
        except ValueError:
            raise InvalidInput("prompt_lens and gen_lens must be equally long") from None
        return cls(tuple((p, g, n) for (p, g), n in pairs.items()), name=name)

    @classmethod
    def from_jsonl(
        cls, path: str | Path, *, count_tokens: Callable[[Any], int], gen_len: int = 256
    ) -> Workload:
        """From a file of requests, one JSON object a line.

        Parameters
        ----------
        path : path
            As :mod:`moegen.graph.requests` describes it.
        count_tokens : callable
            Tokens of a prompt (a str) or of messages (a list of dicts).
        gen_len : int
            Tokens to generate where a line has no ``max_tokens``.

        Raises
        ------
        InvalidInput
            If the file cannot be read, holds no request, or a line of it is malformed; if a
            request has no token.
        """
        gen_len = whole(gen_len, "gen_len", at_least=1)
        pairs: Counter[tuple[int, int]] = Counter()
        for request in read_requests(path):
            messages = request.messages
            try:
                count = count_tokens(request.prompt if messages is None else list(messages))
                prompt = whole(count, "the number of prompt tokens", at_least=1)
            except InvalidInput as e:
                raise InvalidInput(f"{path}, id {request.id!r}: {e}") from e
            pairs[prompt, request.max_tokens or gen_len] += 1
        return cls(tuple((p, g, n) for (p, g), n in pairs.items()), name=Path(path).name)

    @cached_property
    def n(self) -> int:
        """Rows."""
        return sum(n for _, _, n in self.groups)

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(p * n for p, _, n in self.groups)

    @cached_property
    def gen_tokens(self) -> int:
        """Tokens to generate, all rows."""
        return sum(g * n for _, g, n in self.groups)

    @cached_property
    def max_len(self) -> int:
        """Prompt and generation of the longest row."""
        return max(p + g for p, g, _ in self.groups)

    @cached_property
    def max_prompt_len(self) -> int:
        """The longest prompt."""
        return max(p for p, _, _ in self.groups)

    @property
    def mean_len(self) -> float:
        """Prompt and generation of the mean row."""
        return (self.prompt_tokens + self.gen_tokens) / self.n

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and generation length of every row, each of shape [n], shortest prompt first."""
        prompts, gens, counts = np.array(self.groups, dtype=np.int64).T
        return np.repeat(prompts, counts), np.repeat(gens, counts)

    def longest(self, rows: int, *, prompt_only: bool = False) -> int:
        """Tokens of the ``rows`` longest rows together; rows beyond ``n`` are as long as the mean.

        This is what a batch of so many rows needs at worst. With ``prompt_only``
        the generation is left out.
        """
        sums = self._longest_prompts if prompt_only else self._longest_rows
        left = max(0, rows - self.n)
        return sums.first(rows) + -(-left * sums.tokens // self.n)

    @cached_property
    def _longest_rows(self) -> RunningSums:
        return RunningSums(sorted(((p + g, n) for p, g, n in self.groups), reverse=True))

    @cached_property
    def _longest_prompts(self) -> RunningSums:
        return RunningSums((p, n) for p, _, n in reversed(self.groups))

    @cached_property
    def first_step(self) -> tuple[RunningSums, RunningSums]:
        """Floating-point sums of what rows attend to at decode's first step.

        The shortest rows first, and the longest first.
        """
        lengths = sorted((p + 1, n) for p, _, n in self.groups)
        return RunningSums(lengths, 0.0), RunningSums(reversed(lengths), 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"name": self.name, "groups": [list(g) for g in self.groups]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        """The inverse of :meth:`to_dict`."""
        try:
            groups, name = tuple(tuple(g) for g in data["groups"]), data["name"]
        except (KeyError, TypeError) as e:
            raise InvalidInput(f'a workload as a dict needs "name" and "groups": {e!r}') from e
        return cls(groups, name=name)


def presets() -> list[str]:
    """Names of the presets."""
    return sorted(_presets())


def _presets() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(PRESETS.read_text(encoding="utf-8"))
