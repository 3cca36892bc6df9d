"""What the scripts beside this file share: a model and a machine by flags, results that survive.

Every script writes its JSON anew after each point, so that one that is stopped keeps what it had,
and looks at its own time budget before it begins another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from made_up import MADE_UP

import moegen as mg
from moegen.graph.sound import GPU_SHARE
from moegen.timeline import Timeline
from moegen.units import GIB, parse_bytes

_BEGAN = time.perf_counter()


def parser(doc: str | None, *, budget_s: float) -> argparse.ArgumentParser:
    """Flags that all scripts have; ``doc`` is the script's docstring."""
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("out", type=Path, help="the JSON file to write")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument(
        "--model", default="mixtral-8x7b", help=f"of the catalogue, or one of {', '.join(MADE_UP)}"
    )
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--gpu-memory", type=parse_bytes, default=24 * GIB)
    p.add_argument("--host-memory", type=parse_bytes, help="what the machine may give, if not all")
    p.add_argument("--budget-s", type=float, default=budget_s, help="begin nothing after that")
    return p


def model_of(args: argparse.Namespace) -> tuple[mg.ModelSpec, mg.ModelSpec]:
    """The layers to run, and the whole model that they are part of."""
    whole = spec_of(args.model)
    return whole.with_(n_layers=args.layers), whole


def spec_of(name: str) -> mg.ModelSpec:
    """A model of the catalogue, or a made-up one, in bf16."""
    if name in MADE_UP:
        return mg.ModelSpec.from_config(MADE_UP[name], name)
    return mg.ModelSpec.from_pretrained(name).with_(dtype="bfloat16")


def engine_of(args: argparse.Namespace, model: mg.ModelSpec, plan: Any = "auto") -> mg.Engine:
    """Random weights on the device, with GPU memory held to the cap."""
    cap_gpu(args)
    return mg.Engine.random(
        model,
        plan,
        device=args.device,
        gpu_memory_bytes=args.gpu_memory,
        host_memory_bytes=args.host_memory,
        hardware=mg.HardwareSpec.from_name("h200"),
    )


def kept_bytes(engine: mg.Engine, whole: mg.ModelSpec, s: mg.Strategy, work: mg.Workload) -> int:
    """S_Params with which these layers keep the share that all of the model's could keep.

    Else a few layers would lie on the GPU whole, and nothing would be copied.
    """
    part, hw = engine.model, engine.prepared.capacities
    hw = hw.with_(gpu_memory_bytes=hw.gpu_memory_bytes * GPU_SHARE)
    here, all_ = (m.weight_bytes - m.head_bytes for m in (part, whole))

    def ledger(s_params: int) -> mg.Ledger:
        return mg.memory(part, hw, s.with_(s_params=s_params), work)

    kept = max(0, min(ledger(0).gpu.free_bytes, all_)) * here // all_
    # What is kept takes a little more as packed than its weights: take that back.
    while kept and (over := -ledger(kept).gpu.free_bytes) > 0:
        kept = max(0, kept - over)
    return kept


def cap_gpu(args: argparse.Namespace) -> None:
    """Let the allocator have ``--gpu-memory`` and no byte more."""
    if args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory / total))


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(x for x in lines if x.startswith("model name")).partition(":")[2].strip()
    there = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if there else "no GPU",
        "lanes": device,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


class Results:
    """A JSON file that is whole after every point.

    Parameters
    ----------
    args : Namespace
        Of :func:`parser`.
    **head
        What is known from the beginning.
    """

    def __init__(self, args: argparse.Namespace, **head: Any) -> None:
        self.path, self.device = args.out, args.device
        self._deadline = time.perf_counter() + args.budget_s
        self.data: dict[str, Any] = {"machine": machine(args.device), "complete": False, **head}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._deadline - time.perf_counter()

    def put(self, **values: Any) -> None:
        """Set values and write the file."""
        self.data |= values
        self.save()

    def add(self, point: dict[str, Any], to: str = "points") -> None:
        """Append a point and write the file."""
        self.data.setdefault(to, []).append(point)
        self.save()

    def save(self) -> None:
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self.path)

    def within(self, what: Iterable[Any], each_s: float) -> Iterator[Any]:
        """As many of ``what`` as the budget allows, when one takes ``each_s`` at first guess."""
        for item in what:
            if self.left_s < each_s:
                say(f"no time left for {item}")
                self.data.setdefault("left_out", []).append(str(item))
                self.save()
                continue
            began = time.perf_counter()
            yield item
            each_s = max(each_s, time.perf_counter() - began)

    def done(self) -> None:
        self.put(complete="left_out" not in self.data and "failed" not in self.data)
        say(f"wrote {self.path}")


def say(*words: object) -> None:
    """Print at once, with the seconds since the script began."""
    print(f"[{time.perf_counter() - _BEGAN:6.1f}s]", *words, flush=True)
    sys.stdout.flush()


def steps_s(tl: Timeline) -> list[float]:
    """Time from the end of each step to that of the next."""
    ends = tl.step_end_s.tolist()
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def lane_shares(tl: Timeline) -> dict[str, float]:
    """How busy each lane was in the window that the period is over."""
    begin, end = tl.counted_window_s
    return {
        lane.value: sum(b - a for a, b in tl.spans_s(members, begin, end)) / (end - begin)
        for lane, members in tl.by_lane.items()
    }


def median_task_s(tl: Timeline) -> dict[str, float]:
    """Median duration of each op's tasks."""
    return tl.to_frame().groupby("op")["duration_s"].median().to_dict()
