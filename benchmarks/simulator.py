"""What a simulation takes, against a bare simpy loop with as many timeouts as there are tasks.

    python benchmarks/simulator.py [--model mixtral-8x7b] [--hw c2] [--b-a 150] [--points 4096]

With and without the executor's issuing thread: ``issued`` is ``shared`` where the cost model knows
what handing a task over takes.

Rounds of all of them take turns and the fastest of each counts, in CPU time of this process:
other work on the machine disturbs the ratios least that way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import simpy

import moegen as mg
from moegen.graph.latencies import Latencies
from moegen.sim.cost import Cost
from moegen.sim.maxplus import Compiled
from moegen.sim.scaled import Wrapped

#: What the ratios should be: at most, at most, at most, and at least so many.
TARGETS = {"unshared": 5.0, "shared": 17.0, "issued": 2.0, "compiled": 200.0}
#: What handing a task over takes, about that of an H200's host.
ISSUE_S, LATENCIES = 8e-5, Latencies(3e-5, 5e-5, 4e-5)


class Issued(Wrapped):
    """Another cost model, with what handing tasks over takes."""

    def __init__(self, cost: mg.CostModel) -> None:
        super().__init__(cost)
        self.latencies = LATENCIES

    def estimate(self, task: mg.Task) -> Cost:
        return replace(super().estimate(task), issue_s=ISSUE_S)


def bare_loop(n: int) -> None:
    """What simpy itself takes for n events."""
    env = simpy.Environment()

    def process() -> Iterator[simpy.Event]:
        for _ in range(n):
            yield env.timeout(1.0)

    env.process(process())
    env.run()


def measure(g: mg.TaskGraph, cost: mg.CostModel, points: int, rounds: int) -> dict[str, float]:
    """Seconds of each way, the fastest of some rounds; ``compiled`` is that of one point."""
    compiled, issued = Compiled(g), Issued(cost)
    seconds = compiled.seconds(cost)
    durations = seconds * np.random.default_rng(0).uniform(0.5, 2.0, (points, len(seconds)))
    ways: dict[str, Callable[[], object]] = {
        "simpy": lambda: bare_loop(len(g)),
        "unshared": lambda: mg.simulate(g, cost, shared=False),
        "shared": lambda: mg.simulate(g, cost),
        "issued": lambda: mg.simulate(g, issued),
        "compiled": lambda: compiled.makespan(durations),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            begin = time.process_time()
            run()
            taken[way].append(time.process_time() - begin)
    fastest = {way: min(each) for way, each in taken.items()}
    fastest["compiled"] /= points
    return fastest


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Times of simpy's loop, of the same unissued, and how many points are compiled to one that
    is simulated."""
    return {
        "unshared": seconds["unshared"] / seconds["simpy"],
        "shared": seconds["shared"] / seconds["simpy"],
        "issued": seconds["issued"] / seconds["shared"],
        "compiled": seconds["unshared"] / seconds["compiled"],
    }


def table(n: int, seconds: dict[str, float]) -> str:
    """The results, for people."""
    got = ratios(seconds)
    each = {way: f"{s * 1e3:9.3f} ms {s / n * 1e6:9.3f} us a task" for way, s in seconds.items()}
    return "\n".join(
        [
            f"{n} tasks",
            f"simpy loop {each['simpy']}",
            f"unshared   {each['unshared']} {got['unshared']:8.1f} x simpy"
            f"     (at most {TARGETS['unshared']:.0f})",
            f"shared     {each['shared']} {got['shared']:8.1f} x simpy"
            f"     (at most {TARGETS['shared']:.0f})",
            f"issued     {each['issued']} {got['issued']:8.1f} x shared"
            f"    (at most {TARGETS['issued']:.0f})",
            f"compiled   {each['compiled']} {got['compiled']:8.0f} points for one unshared"
            f" (at least {TARGETS['compiled']:.0f})",
        ]
    )


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="mixtral-8x7b")
    p.add_argument("--layers", type=int, help="all unless given")
    p.add_argument("--hw", default="c2")
    p.add_argument("--B", type=int, default=3640)
    p.add_argument("--b-a", type=int, default=150, help="the fewer rows, the more tasks")
    p.add_argument("--omega", type=float, default=0.6)
    p.add_argument("--points", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=20)
    args = p.parse_args(argv)
    model = mg.ModelSpec.from_pretrained(args.model)
    if args.layers is not None:
        model = model.with_(n_layers=args.layers)
    slots = 8 * model.expert_bytes
    s = mg.Strategy(B=args.B, b_a=args.b_a, b_e=8192, s_expert=slots, omega=args.omega)
    g = mg.build(model, s, phase="decode", kv_len=640)
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name(args.hw))
    print(table(len(g), measure(g, cost, args.points, args.rounds)))


if __name__ == "__main__":
    main()
