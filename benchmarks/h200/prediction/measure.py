"""Profile this machine, then run points that the profile knows nothing of.

    python benchmarks/h200/prediction/measure.py OUT --budget-s 540 [--seed 1] [--zip OUT.zip]

Writes OUT/profile.json, OUT/measured.json and one timeline a point. Every point runs twice, all of
them once before any runs again, so that the spread from run to run is known.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from design import Point, drawn, omega_curve
from harness import machine, say

import moegen as mg
from moegen.units import GIB, parse_bytes

# Layers that are run, decode and prefill points, and rows at most, by model.
MODELS = {"mixtral-8x7b": (4, 14, 5, 2048), "deepseek-v2": (3, 8, 4, 2048)}
STEPS = 6


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("out", type=Path)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--models", nargs="+", default=list(MODELS))
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--points", type=int, nargs=2, metavar=("DECODE", "PREFILL"))
    p.add_argument("--runs", type=int, default=2, help="of every point")
    p.add_argument("--curve", type=int, nargs=2, default=(1024, 640), metavar=("B", "CONTEXT"))
    p.add_argument("--gpu-memory", type=parse_bytes, default=40 * GIB)
    p.add_argument("--host-memory", type=parse_bytes)
    p.add_argument("--budget-s", type=float, default=540)
    p.add_argument("--zip", type=Path, help="keep one archive of everything so far")
    args = p.parse_args(argv)
    out = Run(args)
    models = [mg.ModelSpec.from_pretrained(name).with_(dtype="bfloat16") for name in args.models]
    table = mg.profile(models, device=args.device, on_progress=say, notes=out.notes)
    table.save(args.out / "profile.json")
    out.save(profile_s=time.perf_counter() - out.began)
    for model in models:
        layers, decode, prefill, most = MODELS[model.name]
        if args.points is not None:
            decode, prefill = args.points
        part = model.with_(n_layers=layers)
        points = drawn(part, decode, prefill, args.seed, most)
        if model.name == args.models[0]:
            points += omega_curve(part, *args.curve)
        out.measure(part, points, args)
    out.save(complete=True)


class Run:
    """What was measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.began = time.perf_counter()
        self.args = args
        self.notes: list[str] = []
        self.files: list[str] = []
        self.data: dict[str, Any] = {
            "machine": machine(args.device), "seed": args.seed, "complete": False, "points": [],
        }  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)

    def save(self, **more: Any) -> None:
        self.data |= more | {"notes": self.notes}
        text = json.dumps(self.data, indent=1) + "\n"
        (self.args.out / "measured.json").write_text(text, encoding="utf-8")
        if self.args.zip is None:
            return
        fresh = self.args.zip.with_suffix(".part")
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as z:
            for path in sorted(self.args.out.iterdir()):
                z.write(path, path.name)
        fresh.replace(self.args.zip)

    def measure(self, model: mg.ModelSpec, points: list[Point], args: argparse.Namespace) -> None:
        """Every point, all once before any a second time."""
        say(f"{model.name}: {len(points)} points")
        with mg.Engine.random(
            model,
            device=args.device,
            gpu_memory_bytes=args.gpu_memory,
            host_memory_bytes=args.host_memory,
            hardware=mg.HardwareSpec.from_name("h200"),
        ) as engine:
            say("loaded")
            for run in range(args.runs):
                for point in points:
                    if time.perf_counter() - self.began > args.budget_s:
                        self.notes.append(f"no time left for {model.name} {point.name}")
                        continue
                    self.point(engine, point, run)
                self.save()

    def point(self, engine: mg.Engine, point: Point, run: int) -> None:
        began = time.perf_counter()
        try:
            timeline = engine.execute(point.graph(engine.model), steps=STEPS + 2)
        except (mg.MoegenError, torch.OutOfMemoryError) as e:
            self.notes.append(f"{engine.model.name} {point.name}: {e}")
            say(point.name, e)
            return
        name = f"{engine.model.name}.{point.name}.{run}.json.gz"
        (self.args.out / name).write_bytes(
            gzip.compress(json.dumps(timeline.to_dict()).encode(), 6)
        )
        took_s = time.perf_counter() - began
        self.data["points"].append(
            {
                "model": engine.model.name,
                "layers": engine.model.n_layers,
                **point.to_dict(),
                "run": run,
                "timeline": name,
                "period_s": timeline.period_s,
                "step_end_s": timeline.step_end_s.tolist(),
                "took_s": took_s,
            }
        )
        say(f"{point.name}: {timeline.period_s * 1e3:.1f} ms, took {took_s:.1f} s")


if __name__ == "__main__":
    main()
