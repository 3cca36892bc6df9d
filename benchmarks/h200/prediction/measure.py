"""Profile this machine, then run points that the profile knows nothing of.

    python benchmarks/h200/prediction/measure.py OUT [--budget-s 640] [--seed 1] [--zip OUT.zip]

Writes OUT/profile.json, OUT/measured.json, OUT/slopes.json and one timeline a point and run. Every
point of a model runs twice, those of the curve over omega thrice, all of them once before any runs
again, so that the spread from run to run is known. Each stage is a process of its own: one that
hangs is ended, says where it stood, and is begun again without the point that it hung at.
`kept.py` makes of OUT the results folder that predictions and report are made from.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import json
import math
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from design import Point, drawn, omega_curve
from harness import machine, spec_of
from kept import code, leaving, of_this_script, read, require_folder
from situations import LAYERS, SITUATIONS

import moegen as mg
from moegen.exec.decode_attention import cpu_decode, usual_threads
from moegen.exec.table import BUDGET_S
from moegen.sim.measured import Measured
from moegen.units import GIB, parse_bytes

# Layers that are run, decode and prefill points, and rows at most, by model.
MODELS = {"mixtral-8x7b": (4, 12, 5, 2048), "deepseek-v2": (3, 6, 3, 2048)}
CURVE_ROWS, CURVE_CONTEXT = 1024, 640
STEPS = 5
# What is near to each other, and is chosen from, runs once more.
_CLOSE, _MORE = ("omega-", "planned"), 1
# A point that takes longer hangs.
HANGS_S = 60.0
# With less time left no stage is begun.
_LEAST_S = 20.0
_DAY_S = 86400.0


def main(argv: list[str] | None = None) -> None:
    args = _checked(_parser(), argv)
    args.out.mkdir(parents=True, exist_ok=True)
    _measured(args)  # what is there is gone on with, and may be damaged
    if args.stage is not None:
        {"profile": profile, "points": points, "slopes": slopes}[args.stage](args)
        return
    began = time.perf_counter()
    there = (args.out / "profile.json").exists()
    if there:  # points may rest on it
        _profiled(args)
        _say(f"{args.out} has a profile.json, which is gone on with")
    stages = [
        *([] if there else [("profile", "", args.profile_s)]),
        *(("points", name, args.points_s) for name in args.models),
        ("slopes", args.models[0], args.slopes_s),
    ]
    for stage, model, seconds in stages:
        left_s = args.budget_s - (time.perf_counter() - began)
        done = _stage(args, stage, model, min(seconds, left_s))
        _archive(args)
        if stage == "profile" and not done:
            sys.exit(
                f"measure.py: the profile was not measured in {min(seconds, left_s):.0f} s, and "
                f"nothing can be predicted without it: no point was run. If it ran out of time, "
                f"give it more with --profile-s, now {args.profile_s:g}, and all with --budget-s, "
                f"now {args.budget_s:g}; if it broke off, its own words above say why"
            )


def _parser() -> argparse.ArgumentParser:
    p = of_this_script(__doc__)
    p.add_argument("out", type=Path)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--runs", type=_count, default=2, help="of a point; one more on the curve")
    p.add_argument("--gpu-memory", type=parse_bytes, default=40 * GIB)
    p.add_argument("--host-memory", type=parse_bytes)
    p.add_argument("--budget-s", type=_seconds, default=640, help="for everything")
    p.add_argument("--profile-s", type=_seconds, default=170, help="kernels compiled, too")
    p.add_argument("--profile-budget-s", type=_seconds, default=BUDGET_S, help="of moegen profile")
    p.add_argument("--points-s", type=_seconds, default=230, help="for a model's points")
    p.add_argument("--slopes-s", type=_seconds, default=200, help="for delays")
    p.add_argument("--zip", type=Path, help="keep one archive of everything so far")
    p.add_argument("--stage", choices=("profile", "points", "slopes"), help="this one alone")
    p.add_argument("--model", help="of the stage")
    p.add_argument("--deadline", type=float, help="of the stage, by the clock; a day from now on")
    return p


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _DAY_S:  # with 0 a stage is left out
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, from 0 to a day")
    return seconds


def _checked(p: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The arguments, refused before anything is measured."""
    args = p.parse_args(argv)
    require_folder(args.out, "what is measured goes")
    if args.zip is not None and (args.zip.is_dir() or not args.zip.parent.is_dir()):
        p.error(f"--zip {args.zip}: no file can be there: name one in a folder that there is")
    for name in (*args.models, args.model):
        if name is not None and name not in MODELS:
            p.error(f"{name!r} is none of the models that there are points of: {', '.join(MODELS)}")
    if args.stage in ("points", "slopes") and args.model is None:
        p.error(f"--stage {args.stage} is of one model: name it with --model")
    # No clock of faulthandler's reaches much further.
    latest = time.time() + _DAY_S
    args.deadline = latest if args.deadline is None else min(latest, args.deadline)
    return args


def _stage(args: argparse.Namespace, stage: str, model: str, seconds: float) -> bool:
    """Run a stage, again if it was ended for hanging, as long as there is time.

    Returns
    -------
    bool
        Whether it came to its end.
    """
    deadline = time.time() + seconds
    command = [sys.executable, __file__, str(args.out), "--stage", stage, "--models", *args.models]
    for flag in ("device", "seed", "runs", "gpu_memory", "profile_budget_s"):
        command += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    if args.host_memory is not None:
        command += ["--host-memory", str(args.host_memory)]
    if model:
        command += ["--model", model]
    command += ["--deadline", str(deadline - 5)]
    hung = args.out / "now.json"
    what = f"{stage} {model}".strip()
    while (left_s := deadline - time.time()) > _LEAST_S:
        _say(f"== {what}, {left_s:.0f} s")
        hung.unlink(missing_ok=True)  # what an earlier one was at
        try:
            code = subprocess.run(command, timeout=left_s, check=False).returncode
        except subprocess.TimeoutExpired:
            _say(f"{what} ran out of time")
            return False
        if code == 0:
            return True
        if stage != "points":
            _say(f"{what} ended with {code}")
            return False
        if not hung.exists():
            _say(f"{what} ended with {code} before it began a point: it is not tried again")
            return False
        point = json.loads(hung.read_text(encoding="utf-8"))
        _say(f"{what} ended with {code} at {point['point']}, which is left out from here on")
        data = _measured(args)
        data["failed"].append(point)
        _write(args.out / "measured.json", data)
    _say(f"{what}: there is no time for it")
    return False


def profile(args: argparse.Namespace) -> None:
    """The calibration: nothing else is ever fitted."""
    faulthandler.dump_traceback_later(max(30, args.deadline - time.time()), exit=True)
    models = [spec_of(name) for name in args.models]
    notes: list[str] = []
    began = time.perf_counter()
    cpu_decode(usual_threads(torch.device(args.device)))  # compiles its kernel, once on a machine
    compiled_s = time.perf_counter() - began
    began = time.perf_counter()
    table = mg.profile(
        models,
        device=args.device,
        dtype=models[0].dtype,
        budget_s=args.profile_budget_s,
        on_progress=_say,
        notes=notes,
    )
    table.save(args.out / "profile.json")
    seconds = time.perf_counter() - began
    took = {"compiled_s": compiled_s, "seconds": seconds, "notes": notes}
    _write(args.out / "profile_notes.json", took)
    _say(f"profile took {took['seconds']:.1f} s; {'; '.join(notes) or 'nothing to note'}")


def points(args: argparse.Namespace) -> None:
    """Every point of a model, all once before any a second time."""
    layers, decode, prefill, most = MODELS[args.model]
    whole = spec_of(args.model)
    model = whole.with_(n_layers=layers)
    todo = drawn(model, decode, prefill, args.seed, most)
    if args.model == next(iter(MODELS)):
        todo += omega_curve(model, CURVE_ROWS, CURVE_CONTEXT)
        todo.append(_planned(args, model))
    data = _same_machine(args, _measured(args))
    failed = {(x["model"], x["point"]) for x in data["failed"]}
    done = {(p["model"], p["name"], p["run"]) for p in data["points"]}
    _say(f"{args.model}: {len(todo)} points")
    with _engine(args, model) as engine:
        _say("loaded")
        for run in range(args.runs + _MORE):
            for point in todo:
                if run >= args.runs and not point.name.startswith(_CLOSE):
                    continue
                key = (args.model, point.name, run)
                if key in done or key[:2] in failed or time.time() > args.deadline:
                    continue
                _write(args.out / "now.json", {"model": args.model, "point": point.name})
                faulthandler.dump_traceback_later(HANGS_S, exit=True)
                data["points"].append(_run(args, engine, point, run))
                faulthandler.cancel_dump_traceback_later()
                _write(args.out / "measured.json", data)
                (args.out / "now.json").unlink()


def _run(args: argparse.Namespace, engine: mg.Engine, point: Point, run: int) -> dict[str, Any]:
    began = time.perf_counter()
    timeline = engine.execute(point.graph(engine.model), steps=STEPS + 2)
    name = f"{engine.model.name}.{point.name}.{run}.json.gz"
    packed = gzip.compress(json.dumps(timeline.to_dict()).encode(), 6)
    (args.out / name).write_bytes(packed)
    took_s = time.perf_counter() - began
    _say(f"{point.name}: {timeline.period_s * 1e3:.1f} ms, took {took_s:.1f} s")
    return {
        "model": engine.model.name,
        "layers": engine.model.n_layers,
        **point.to_dict(),
        "run": run,
        "timeline": name,
        "period_s": timeline.period_s,
        "step_end_s": timeline.step_end_s.tolist(),
        "took_s": took_s,
    }


def _planned(args: argparse.Namespace, model: mg.ModelSpec) -> Point:
    """What the planner takes for the rows of the omega curve, nothing staying on the GPU."""
    cost = _profiled(args)
    hw = cost.hw.with_(gpu_memory_bytes=args.gpu_memory)
    work = mg.Workload.uniform(CURVE_ROWS, CURVE_CONTEXT - 128, 256)
    chosen = mg.plan(model, hw, work, cost, B=CURVE_ROWS, s_params=0).decode
    return Point("planned", "decode", chosen.to_dict(), (CURVE_CONTEXT,) * CURVE_ROWS)


def slopes(args: argparse.Namespace) -> None:
    """Delays injected class by class, and what the profile's simulator makes of them."""
    faulthandler.dump_traceback_later(max(30, args.deadline - time.time()), exit=True)
    model = spec_of(args.model).with_(n_layers=LAYERS)
    cost = _profiled(args)
    data: dict[str, Any] = {"model": args.model, "layers": LAYERS, "situations": []}
    with _engine(args, model) as engine:
        for situation in SITUATIONS:
            g = situation.graph(model)
            engine.execute(g, 2)
            ops = situation.held_back(g)
            began = time.perf_counter()
            frame = mg.causal(
                engine,
                g,
                cost,
                ops,
                steps=situation.steps,
                rounds=situation.rounds,
                share=situation.share,
            )
            took_s = time.perf_counter() - began
            _say(f"{situation.name}, took {took_s:.1f} s\n{frame.to_string()}")
            rows = json.loads(frame.to_json(orient="records") or "[]")
            data["situations"].append(situation.to_dict(model) | {"slopes": rows})
            _write(args.out / "slopes.json", data)


def _profiled(args: argparse.Namespace) -> Measured:
    path = args.out / "profile.json"
    if not path.exists():
        raise mg.InvalidInput(f"{args.out} has no profile.json: run --stage profile first")
    return mg.CostModel.from_profile(path, allow_mismatch=True)


def _engine(args: argparse.Namespace, model: mg.ModelSpec) -> mg.Engine:
    return mg.Engine.random(
        model,
        device=args.device,
        dtype=model.dtype,
        gpu_memory_bytes=args.gpu_memory,
        host_memory_bytes=args.host_memory,
        hardware=mg.HardwareSpec.from_name("h200"),
    )


def _same_machine(args: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """What was measured, and by what; refused if that was not here, or other points were drawn."""
    now = {"machine": machine(args.device) | {"code": code()}, "seed": args.seed}
    if not data["points"]:
        return data | now
    was = {"seed": data.get("seed"), **data.get("machine", {})}
    is_now = {"seed": args.seed, **now["machine"]}
    for key in was.keys() & is_now.keys() - {"date"}:
        if was[key] != is_now[key]:
            raise mg.InvalidInput(
                f"{args.out} has points of {key} {was[key]}, and here it is {is_now[key]}: one "
                f"measurement is of one machine, one code and one seed; measure into another folder"
            )
    return data


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    kept = read(args.out / "measured.json", "delete it, or measure into another folder")
    return kept or {"points": [], "failed": []}


def _write(path: Path, data: Any) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def _archive(args: argparse.Namespace) -> None:
    """Everything so far in one file, in one piece."""
    if args.zip is None:
        return
    fresh = args.zip.with_suffix(".part")
    own = {fresh.resolve(), args.zip.resolve()}
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as z:
        for path in sorted(args.out.iterdir()):
            if path.resolve() not in own:
                z.write(path, path.name)
    fresh.replace(args.zip)


_BEGAN = time.perf_counter()


def _say(*words: object) -> None:
    print(f"[{time.perf_counter() - _BEGAN:6.1f}s]", *words, flush=True)


if __name__ == "__main__":
    leaving(main)
