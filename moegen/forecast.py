"""What the sound choice of a plan would do on a machine: memory, speed, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moegen.graph.build import build
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import Ledger, memory
from moegen.graph.model import ModelSpec
from moegen.graph.sound import sound_plan
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.workload import Workload
from moegen.sim.bounds import bound
from moegen.sim.cost import CostModel
from moegen.sim.job import JobEstimate, estimate_job

if TYPE_CHECKING:
    from moegen.graph.model import Phase


@dataclass(frozen=True)
class Forecast:
    """A plan and what is predicted of it.

    Attributes
    ----------
    plan : Plan
    prefill, decode : Ledger
        Memory of each phase.
    job : JobEstimate
        Seconds of each phase for the whole workload.
    prefill_binds, decode_binds : str
        The part of :class:`moegen.sim.bounds.Bound` that limits a step with every row in it.
    """

    model: ModelSpec
    hw: HardwareSpec
    work: Workload
    plan: Plan
    prefill: Ledger
    decode: Ledger
    job: JobEstimate
    prefill_binds: str
    decode_binds: str

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second, over the job."""
        return self.work.prompt_tokens / self.job.prefill_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second that decode steps give, over the job; None if it needs none."""
        tokens = self.work.gen_tokens - self.work.n  # each row's first comes from prefill
        return tokens / self.job.decode_s if self.job.decode_s else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "model": self.model.name,
            "hardware": self.hw.name,
            "workload": self.work.name,
            "plan": {
                "prefill": self.plan.prefill.to_dict(),
                "decode": self.plan.decode.to_dict(),
            },
            "memory": {"prefill": self.prefill.to_dict(), "decode": self.decode.to_dict()},
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "time_s": self.job.time_s,
            "load_s": self.job.load_s,
            "prefill_s": self.job.prefill_s,
            "decode_s": self.job.decode_s,
            "binds": {"prefill": self.prefill_binds, "decode": self.decode_binds},
        }


def forecast(
    model: ModelSpec,
    hw: HardwareSpec,
    work: Workload,
    fixed: Mapping[str, Any] | None = None,
) -> Forecast:
    """Choose a sound plan and predict what it does.

    Parameters
    ----------
    fixed : mapping, optional
        Fields of decode's Strategy that stay as they are given; the rest is chosen.

    Raises
    ------
    Infeasible
        If nothing fits with what is fixed.
    """
    plan = sound_plan(model, hw, work, fixed)
    decode = memory(model, hw, plan.decode, work).require()
    prefill = memory(model, hw, plan.prefill, work, phase="prefill", batch=plan.decode.B).require()
    cost = CostModel.roofline(hw)
    return Forecast(
        model,
        hw,
        work,
        plan,
        prefill,
        decode,
        job=estimate_job(model, plan, work, cost, load_bytes_per_s=hw.load_bytes_per_s),
        prefill_binds=_binds(model, plan.prefill, "prefill", work, cost),
        decode_binds=_binds(model, plan.decode, "decode", work, cost),
    )


def _binds(model: ModelSpec, s: Strategy, phase: Phase, work: Workload, cost: CostModel) -> str:
    """What limits a step of mean rows: prompts, or rows halfway through their answers."""
    prompt_len = round(work.prompt_tokens / work.n)
    if phase == "prefill":
        return bound(build(model, s, phase, prompt_len=max(1, prompt_len)), cost).binds
    kv_len = prompt_len + round(work.gen_tokens / (2 * work.n))
    return bound(build(model, s, phase, kv_len=kv_len), cost).binds
