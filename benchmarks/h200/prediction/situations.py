"""Where delays are injected: in each situation other things bind.

Two layers, so that one waits for the other, and few enough that a step is short. Delays are far
longer than steps differ from each other on a machine that others use too. Where steps are short,
stretches are long enough that single steps which others disturb do not show. There are four rounds
of them: the issuing thread's tempo drifts by half within a minute, and where nothing is predicted
to show, two left an error of a twentieth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from design import layer_bytes

import moegen as mg
from moegen.sim.delays import delayed_ops

LAYERS = 2


@dataclass(frozen=True)
class Situation:
    """One situation.

    Attributes
    ----------
    name : str
    rows, context : int
    omega : float
    kept : bool
        Whether all weights stay on the GPU; else they are copied, with a slot for each expert
        of a layer.
    share : float
        What delays of a class add to a step, as a part of it.
    steps, rounds : int
        Of a stretch of steps with the same delays, and of all stretches, as `moegen.causal` takes
        them.
    b_a, kv_slots : int
        With one slot, history is fetched and attended to in turn.
    ops : tuple of str, optional
        Those that have work are held back; all by default.
    """

    name: str
    rows: int
    context: int
    omega: float
    kept: bool
    share: float
    steps: int
    rounds: int
    b_a: int = 64
    kv_slots: int = 2
    ops: tuple[str, ...] | None = None

    def strategy(self, model: mg.ModelSpec) -> mg.Strategy:
        """For the layers of ``model``."""
        return mg.Strategy(
            B=self.rows,
            b_a=self.b_a,
            b_e=8192,
            omega=self.omega,
            s_expert=0 if self.kept else layer_bytes(model),
            s_params=sum(x.weight_bytes for x in model.layers) if self.kept else 0,
            kv_slots=self.kv_slots,
        )

    def graph(self, model: mg.ModelSpec) -> mg.TaskGraph:
        """Of one step."""
        return mg.build(model, self.strategy(model), kv_len=self.context)

    def held_back(self, g: mg.TaskGraph) -> list[str]:
        """The ops of its graph that are."""
        return [op for op in delayed_ops(g, None) if self.ops is None or op in self.ops]

    def to_dict(self, model: mg.ModelSpec) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "kept": self.kept,
            "context": self.context,
            "share": self.share,
            "steps": self.steps,
            "rounds": self.rounds,
            "strategy": self.strategy(model).to_dict(),
        }


# A second of a step is dear where weights are copied: what stands beside another op on its lane,
# or is done once a step, has its turn where they are kept.
_COPIED = (
    "copy_dense", "copy_expert", "pre_attn", "attn_cpu", "recv_attn", "fetch_kv", "attn_gpu",
    "expert",
)  # fmt: skip
_KEPT = (
    "pre_attn", "fetch_kv", "append_kv", "attn_gpu", "post_attn", "route", "copy_counts", "expert",
)  # fmt: skip
SITUATIONS = (
    Situation(
        "kept, CPU", rows=512, context=192, omega=1.0, kept=True, share=0.5, steps=9, rounds=4
    ),
    Situation(
        "kept, GPU",
        rows=512,
        context=192,
        omega=0.0,
        kept=True,
        share=0.5,
        steps=9,
        rounds=4,
        b_a=128,
        kv_slots=1,
        ops=_KEPT,
    ),
    Situation(
        "copied",
        rows=384,
        context=320,
        omega=0.4,
        kept=False,
        share=0.25,
        steps=5,
        rounds=4,
        ops=_COPIED,
    ),
)
