"""How far a run has come, and how long it may still take."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from moegen.jobs.encoded import Job
from moegen.jobs.output import Row
from moegen.units import format_seconds

if TYPE_CHECKING:
    from moegen.exec.generate import StepReport
    from moegen.graph.strategy import Plan
    from moegen.sim.job import JobEstimate

_RECENT_STEPS = 16


class Pace:
    """Follows a run by its rows and steps.

    The rows of a batch decode together, one token a step each, so what a batch still needs is
    the steps of the row that may get the most tokens. A row that ends early takes its share
    out of the tokens in all, and perhaps steps with it: the time left then shrinks.

    Parameters
    ----------
    job : Job
    plan : Plan
    expected : JobEstimate
        Stands in for the speed of a phase until it has been measured.
    """

    def __init__(self, job: Job, plan: Plan, expected: JobEstimate) -> None:
        self._B = plan.decode.B
        self._prompts, self._limits = job.prompt_lens, job.limits
        self._index = {request.id: i for i, request in enumerate(job.served)}
        self._live = set(self._index.values())
        self.rows, self.rows_done = len(job.served), 0
        self.tokens, self.tokens_done = sum(job.limits), 0
        self.phase = "prefill"
        self._prefilled = 0  # rows
        self._steps = 0  # of decode, in this batch
        self._s_per_prompt_token = expected.prefill_s / sum(self._prompts)
        self._s_per_step = expected.decode_s / max(1, expected.decode_steps)
        self._prefill_s = self._decode_s = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)  # rows, seconds

    def on_row(self, row: Row) -> None:
        """A row was written."""
        index = self._index.get(row["id"])
        if index is None or index not in self._live:
            return  # an error row
        self._live.remove(index)
        self.rows_done += 1
        self.tokens -= self._limits[index] - row["completion_tokens"]

    def on_step(self, step: StepReport) -> None:
        """A step was done."""
        self.phase, self.tokens_done = step.phase, step.tokens_done
        if step.phase == "prefill":
            self._steps = 0
            self._prefilled += step.rows
            self._s_per_prompt_token = step.prefill_s / sum(self._prompts[: self._prefilled])
        else:
            self._steps += 1
            self._recent.append((step.rows, step.decode_s - self._decode_s))
            self._s_per_step = sum(s for _, s in self._recent) / len(self._recent)
        self._prefill_s, self._decode_s = step.prefill_s, step.decode_s

    @property
    def left_s(self) -> float:
        """Seconds still to go if no further row ends before its limit."""
        batch = max(0, self._prefilled - 1) // self._B
        mine = self._limits_of(batch)
        steps = max(0, max(mine, default=1) - 1 - self._steps)
        for later in range(batch + 1, -(-self.rows // self._B)):
            steps += max(self._limits_of(later)) - 1
        prompts = sum(self._prompts[self._prefilled :])
        return prompts * self._s_per_prompt_token + steps * self._s_per_step

    def _limits_of(self, batch: int) -> list[int]:
        rows = range(batch * self._B, min(self.rows, (batch + 1) * self._B))
        return [self._limits[i] for i in rows if i in self._live]

    @property
    def tokens_per_s(self) -> float:
        """Of this phase: prompt tokens in prefill, sampled ones over the last steps of decode."""
        if self.phase == "prefill":
            done = sum(self._prompts[: self._prefilled])
            return done / self._prefill_s if self._prefill_s else 0.0
        seconds = sum(s for _, s in self._recent)
        return sum(rows for rows, _ in self._recent) / seconds if seconds else 0.0

    def __str__(self) -> str:
        kind = "prompt tokens/s" if self.phase == "prefill" else "tokens/s"
        left = f", {_about(self.left_s)} left" if self.tokens_done < self.tokens else ""
        return (
            f"{self.rows_done}/{self.rows} rows, {self.tokens_done}/{self.tokens} tokens, "
            f"{self.tokens_per_s:.1f} {kind}{left}"
        )


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else format_seconds(seconds)
