"""The points that predictions are held against: drawn at random, so that nobody chose them.

A point is what `moegen.build` and `Engine.execute` need: a phase, a Strategy, and lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import moegen as mg
from moegen.graph.layer import Phase

# Of made-up KV and weights: what the machine can hold beside the layers.
KV_BYTES, SLOT_BYTES = 24e9, 6e9
# Tokens of a prefill wave and of a prompt, from and to.
PREFILL_TOKENS, PROMPT = (8192, 131072), (64, 2048)
OMEGAS = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class Point:
    """One point.

    Attributes
    ----------
    name : str
    phase : {"decode", "prefill"}
    strategy : mapping
        Fields of a Strategy.
    lengths : tuple of int
        Tokens in each row's KV store, or of each prompt.
    """

    name: str
    phase: Phase
    strategy: dict[str, Any]
    lengths: tuple[int, ...]

    def graph(self, model: mg.ModelSpec) -> mg.TaskGraph:
        """Its graph, of one step."""
        return mg.build(model, mg.Strategy(**self.strategy), self.phase, lengths=self.lengths)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; runs of equal lengths are folded."""
        folded: list[list[int]] = []
        for n in self.lengths:
            if folded and folded[-1][0] == n:
                folded[-1][1] += 1
            else:
                folded.append([n, 1])
        return asdict(self) | {"lengths": folded}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Point:
        """Inverse of :meth:`to_dict`."""
        lengths = tuple(n for n, times in data["lengths"] for _ in range(times))
        return cls(data["name"], data["phase"], data["strategy"], lengths)


def drawn(model: mg.ModelSpec, decode: int, prefill: int, seed: int, most: int) -> list[Point]:
    """So many points of each phase.

    Parameters
    ----------
    model : ModelSpec
        The layers that are run.
    seed : int
    most : int
        Rows of a decode batch at most.
    """
    rng = random.Random(f"{model.name} {seed}")
    points = [_decode(model, rng, f"decode-{seed}-{i}", most) for i in range(decode)]
    return points + [_prefill(model, rng, f"prefill-{seed}-{i}") for i in range(prefill)]


def omega_curve(model: mg.ModelSpec, B: int, context: int) -> Iterator[Point]:
    """Eleven points that differ in omega alone."""
    for omega in OMEGAS:
        s = mg.Strategy(B=B, b_a=64, b_e=8192, omega=omega, s_expert=layer_bytes(model))
        yield Point(f"omega-{omega:.1f}", "decode", s.to_dict(), (context,) * B)


def layer_bytes(model: mg.ModelSpec) -> int:
    """Of the experts of a layer."""
    return max(layer.experts_bytes for layer in model.layers)


def _log_uniform(rng: random.Random, low: float, high: float) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _groups(model: mg.ModelSpec) -> int:
    from moegen.graph.sound_waves import expert_group

    return expert_group(model)


def _decode(model: mg.ModelSpec, rng: random.Random, name: str, most: int) -> Point:
    token_bytes = model.kv_bytes_per_token
    while True:
        B, context = _log_uniform(rng, 64, most), _log_uniform(rng, 128, 2048)
        if rng.random() < 0.25:  # of many lengths
            lengths = tuple(_log_uniform(rng, 32, 2 * context) for _ in range(B))
        else:
            lengths = (context,) * B
        b_a, kv_slots = rng.choice((16, 32, 64, 128, 256)), rng.choice((1, 2, 3))
        slot = kv_slots * b_a * max(lengths) * token_bytes / model.n_layers
        if sum(lengths) * token_bytes < KV_BYTES and slot < SLOT_BYTES:
            break
    group = _groups(model)
    slots = rng.choice((2, 4, 8, 16))
    s = mg.Strategy(
        B=B,
        b_a=b_a,
        b_e=rng.choice((256, 1024, 8192)),
        omega=rng.choice(OMEGAS),
        s_expert=slots * group * model.expert_bytes,
        kv_slots=kv_slots,
        dense_slots=rng.choice((1, 2)),
        expert_group=group,
    )
    return Point(name, "decode", s.to_dict(), lengths)


def _prefill(model: mg.ModelSpec, rng: random.Random, name: str) -> Point:
    tokens, prompt = _log_uniform(rng, *PREFILL_TOKENS), _log_uniform(rng, *PROMPT)
    prompt = min(prompt, tokens)
    rows = max(1, tokens // prompt)
    group = _groups(model)
    s = mg.Strategy(
        B=rows,
        b_a=max(1, min(rows, rng.choice((2048, 8192, 16384)) // prompt)),
        b_e=rng.choice((2048, 8192)),
        s_expert=rng.choice((4, 8, 16)) * group * model.expert_bytes,
        dense_slots=rng.choice((1, 2)),
        expert_group=group,
    )
    return Point(name, "prefill", s.to_dict(), (prompt,) * rows)
