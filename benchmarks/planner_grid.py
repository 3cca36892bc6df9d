"""The planner's choice against an exhaustive grid, each strategy of it simulated whole.

    python benchmarks/planner_grid.py [--every N] [--jobs N]

Three models of a few layers, three machines of so much less memory, and for each pair 5,000
strategies and more. A strategy counts as good as the tokens a second of `moegen.simulate` on the
graph of a step at the mean context. The planner's choice must be within 0.5% of the best.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import moegen as mg
from moegen.sim.search import plan

# Models by name and layers; machines by name, and their memory for a layer of the model's.
MODELS = {"mixtral-8x7b": 6, "deepseek-v2": 8, "qwen3-30b-a3b": 6}
MACHINES = ("c2", "c3", "h200")
PROMPT, ANSWER = 512, 256
WITHIN = 0.005


@dataclass(frozen=True)
class Case:
    """A model of a few layers on a machine with as much memory a layer as the whole one has."""

    model: mg.ModelSpec
    hw: mg.HardwareSpec
    work: mg.Workload

    @classmethod
    def of(cls, name: str, machine: str) -> Case:
        whole = mg.ModelSpec.from_pretrained(name)
        few = whole.with_(n_layers=MODELS[name])
        hw = mg.HardwareSpec.from_name(machine)
        # Embedding and output matrix, and what a step works in, are not fewer.
        share = few.weight_bytes / whole.weight_bytes
        hw = hw.with_(
            host_memory_bytes=few.weight_bytes + share * max(
                hw.host_memory_bytes - whole.weight_bytes, 0.5 * hw.host_memory_bytes
            ),
            gpu_memory_bytes=few.head_bytes + max(0.3, share) * hw.gpu_memory_bytes,
        )  # fmt: skip
        # So many rows that it makes no difference how full the last batch is.
        return cls(few, hw, mg.Workload.uniform(100_000, PROMPT, ANSWER))

    def tokens_per_s(self, s: mg.Strategy) -> float:
        """What a strategy is judged by."""
        graph = mg.build(self.model, s, "decode", kv_len=PROMPT + ANSWER // 2)
        cost = mg.CostModel.roofline(self.hw)
        return s.B / mg.simulate(graph, cost, steps=3).period_s

    def grid(self) -> Iterator[mg.Strategy]:
        """Every strategy of the grid that fits."""
        model, hw, work = self.model, self.hw, self.work
        most = mg.plan(model, hw, work).decode.B
        n = model.layers[-1].n_experts
        groups = [1, 2] if n <= 16 else [n // 16, n // 8]
        for B, b_a, group, slots, dense in itertools.product(
            (most, most * 3 // 4, most // 2), (32, 64, 128, 256, 512), groups, (1, 2, 4, 8, 16),
            (1, 2),
        ):  # fmt: skip
            for omega, b_e in itertools.product([i / 20 for i in range(21)], (1024, 8192)):
                s = mg.Strategy(
                    B, min(b_a, B), b_e, slots * group * model.expert_bytes, 0, omega,
                    dense_slots=dense, expert_group=group,
                )  # fmt: skip
                free = mg.memory(model, hw, s, work).gpu.free_bytes
                if free < 0:
                    continue
                for share in (0, 1):
                    kept = s.with_(s_params=share * max(0, free - 64 * 2**20))
                    if mg.memory(model, hw, kept, work).fits:
                        yield kept


def judge(name: str, machine: str, every: int) -> tuple[str, str, int, float, float]:
    """How many strategies of the grid, the best of them, and the planner's choice."""
    case = Case.of(name, machine)
    grid = list(case.grid())
    some = random.Random(0).sample(grid, max(1, len(grid) // every))
    best = max(case.tokens_per_s(s) for s in some)
    chosen = plan(case.model, case.hw, case.work).decode
    return name, machine, len(some), best, case.tokens_per_s(chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description="The planner against an exhaustive grid")
    parser.add_argument("--every", type=int, default=1, help="judge one of so many of the grid")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    pairs = list(itertools.product(MODELS, MACHINES))
    worst = 0.0
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, machine, n, best, chosen in pool.map(
            judge, *zip(*pairs, strict=True), itertools.repeat(args.every)
        ):
            short = 1 - chosen / best
            worst = max(worst, short)
            print(
                f"{name:14} {machine:5} {n:6,} strategies, the best {best:9,.1f} tokens/s, the "
                f"planner's {chosen:9,.1f} ({-short:+.2%})",
                flush=True,
            )
    print("within" if worst <= WITHIN else "NOT within", f"{WITHIN:.1%} of the best everywhere")
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
