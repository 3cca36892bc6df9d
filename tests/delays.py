"""Ways to hold tasks back, on the issuing side of a lane and on the executing side."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moegen.graph.task import Lane, Task

SHARE_DELAYED = 0.04
MOST_S = 3e-3
SLOW_LANE_S = 4e-4


@dataclass(frozen=True)
class RandomDelays:
    """Mostly none, now and then up to 3 ms; for every other seed one lane is slow throughout.

    A delay follows from seed, side, task and step alone, whatever the order of the asking.
    """

    seed: int

    def issue_s(self, task: Task, index: int) -> float:
        return self._draw("issue", task, index)

    def run_s(self, task: Task, index: int) -> float:
        return self._draw("run", task, index)

    @property
    def slow(self) -> tuple[str, Lane] | None:
        """Side and lane that is slow throughout, if any."""
        if self.seed % 2:
            return None
        rng = random.Random(self.seed)
        return rng.choice(("issue", "run")), rng.choice(list(Lane))

    def _draw(self, side: str, task: Task, index: int) -> float:
        rng = random.Random(f"{self.seed} {side} {index} {task.id}")
        if rng.random() < SHARE_DELAYED:
            return rng.uniform(0, MOST_S)
        return rng.uniform(0, 2 * SLOW_LANE_S) if self.slow == (side, task.lane) else 0.0


@dataclass(frozen=True)
class Held:
    """One task of ``op`` starts late by ``seconds``, in each of the first two steps.

    Of a layer's tasks the first micro-batch's or expert's; ``layer`` does not matter to an op
    that is in no layer.
    """

    op: str
    layer: int
    seconds: float

    def issue_s(self, task: Task, index: int) -> float:
        return 0.0

    def run_s(self, task: Task, index: int) -> float:
        op, _, _, layer, microbatch, expert = task.id
        here = op == self.op and layer in (self.layer, -1) and max(microbatch, expert) <= 0
        return self.seconds if here and index < 2 else 0.0
