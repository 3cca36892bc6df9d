"""A thousand decode steps: the same tokens however tasks are held up, and no memory that grows.

The same prompts are answered several times, without delays and with random ones on both sides of
every lane; tokens are compared one by one. Host memory (RSS) and what the allocator holds of the
GPU's are sampled at every step.

    python benchmarks/h200/long_run.py OUT.json [--layers 4] [--B 64] [--steps 1000]
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Results, engine_of, model_of, parser, say

import moegen as mg
from moegen.graph.host_memory import held_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from delays import RandomDelays  # noqa: E402

SETTLED = 100  # steps after which nothing should grow


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__, budget_s=200)
    p.add_argument("--B", type=int, default=64)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--prompt-len", type=int, default=64)
    p.add_argument("--omega", type=float, default=0.5)
    p.add_argument("--resident", type=float, default=0.75, help="share of the weights kept")
    p.add_argument("--seeds", type=int, nargs="+", default=(1,), help="of the delays, one run each")
    args = p.parse_args(argv)
    model, _ = model_of(args)
    out = Results(args, model=model.name, layers=args.layers, gpu_memory_bytes=args.gpu_memory)
    strategy = mg.Strategy(
        B=args.B,
        b_a=max(1, args.B // 4),
        b_e=8192,
        omega=args.omega,
        s_expert=8 * model.expert_bytes,
        s_params=int(args.resident * (model.weight_bytes - model.head_bytes)),
    )
    out.put(strategy=strategy.to_dict(), steps=args.steps, prompt_len=args.prompt_len)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, model.vocab) for _ in range(args.prompt_len)] for _ in range(args.B)
    ]
    first: list[list[int]] | None = None
    with engine_of(args, model, strategy) as engine:
        runs = [None, *args.seeds]
        for seed in out.within(runs, 0):
            tokens, run = once(engine, prompts, args, seed)
            if tokens is not None and first is None:
                first = tokens
            if tokens is not None and first is not None:
                run["same_tokens"] = tokens == first
                run["rows_that_differ"] = sum(a != b for a, b in zip(tokens, first, strict=True))
            out.add(run, to="runs")
            say({k: v for k, v in run.items() if k != "samples"})
    out.done()


def once(
    engine: mg.Engine, prompts: list[list[int]], args: Any, seed: int | None
) -> tuple[list[list[int]] | None, dict[str, Any]]:
    """Answer the prompts once; tokens by row, and what was seen on the way."""
    samples: list[tuple[int, int]] = []
    cuda = args.device == "cuda"

    def look(_: Any) -> None:
        samples.append((held_bytes(), torch.cuda.memory_reserved() if cuda else 0))

    began = time.perf_counter()
    done = engine.generate(
        prompts,
        max_new_tokens=args.steps + 1,
        ignore_eos=True,
        on_step=look,
        delays=None if seed is None else RandomDelays(seed),
    )
    took_s = time.perf_counter() - began
    tokens = [c.token_ids for c in done]
    host, gpu = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    text = ",".join(str(t) for row in tokens for t in row)
    every = max(1, len(samples) // 200)
    return tokens, {
        "seed": seed,
        "delays": seed is not None,
        "slow_lane": None if seed is None else str(RandomDelays(seed).slow),
        "took_s": took_s,
        "steps": len(samples),
        "tokens": sum(map(len, tokens)),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "distinct_tokens": len({t for row in tokens for t in row}),
        "host": growth(host),
        "gpu": growth(gpu),
        "samples": {
            "every": every,
            "host_bytes": host[::every].tolist(),
            "gpu_bytes": gpu[::every].tolist(),
        },
    }


def growth(held: np.ndarray) -> dict[str, float]:
    """Slope in bytes a step, and largest less smallest, once things have settled."""
    settled = held[min(SETTLED, len(held) // 2) :]
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0]) if len(settled) > 1 else 0.0
    return {
        "settled_bytes": float(settled[0]),
        "end_bytes": float(settled[-1]),
        "spread_bytes": float(settled.max() - settled.min()),
        "slope_bytes_per_step": slope,
    }


if __name__ == "__main__":
    main()
