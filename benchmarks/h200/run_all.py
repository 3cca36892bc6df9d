"""Run scripts of this folder one after the other, each in a process and a time limit of its own.

    python benchmarks/h200/run_all.py FOLDER [--budget-s 560] [--zip FOLDER/results.zip] [NAME ...]

Each writes ``FOLDER/NAME.json`` and ``FOLDER/NAME.log``. With ``--zip`` one archive holds them all
and is written anew every few seconds: on a machine that gives back few files, or is taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
# What each is called with, by name, and the seconds that it may take; in order of what they show.
RUNS: dict[str, tuple[str, float]] = {
    "cpu_attention": ("cpu_attention.py --budget-s 80", 100),
    "decode_bound": (
        "decode_bound.py --budget-s 150 --timelines 512:0.5:64:none 512:1:64:none",
        180,
    ),
    "prefill": ("prefill.py --budget-s 80", 110),
    "small_batch": ("small_batch.py --budget-s 60", 80),
    "memory": ("memory.py --budget-s 100", 120),
    "long_run": ("long_run.py --budget-s 180", 200),
    "sanitizer": ("sanitizer.py --budget-s 200", 220),
    "decode_bound_whole": (
        "decode_bound.py --layers 32 --host-memory 250GiB --each-s 60 --steps 5 --budget-s 310 "
        "--points max:1:64:whole max:0.85:64:whole",
        340,
    ),
    "peers": ("peers.py --budget-s 260", 280),
}
# Of a machine with one GPU and little memory; the last two want 256 GiB.
USUAL = tuple(name for name in RUNS if name not in ("decode_bound_whole", "peers"))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path)
    p.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; all that one GPU does")
    p.add_argument("--budget-s", type=float, default=560)
    p.add_argument("--host-memory", help="what the machine may give: goes to every script")
    p.add_argument("--zip", type=Path, help="keep one archive of everything so far")
    p.add_argument("--set", action="append", default=[], metavar="NAME=FLAGS", help="more flags")
    args = p.parse_args(argv)
    unknown = set(args.names) - RUNS.keys()
    if unknown:
        p.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    more = dict(x.split("=", 1) for x in args.set)
    args.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    ended: dict[str, object] = {}
    for name in args.names or USUAL:
        left_s = args.budget_s - (time.perf_counter() - began)
        if left_s < 20:
            ended[name] = "no time left"
            continue
        t = time.perf_counter()
        code = run(name, more.get(name, ""), left_s, args)
        ended[name] = {"exit_code": code, "seconds": round(time.perf_counter() - t, 1)}
        print(f"=== {name}: {ended[name]}", flush=True)
        (args.folder / "run_all.json").write_text(json.dumps(ended, indent=1) + "\n")
        archive(args)
    print(json.dumps(ended), flush=True)
    return 0 if all(isinstance(x, dict) and x["exit_code"] == 0 for x in ended.values()) else 1


def run(name: str, more: str, left_s: float, args: argparse.Namespace) -> int | None:
    """One script, its output shown and logged; None if it ran out of time."""
    words, limit_s = RUNS[name]
    script, *flags = shlex.split(words)
    limit_s = min(limit_s, left_s)
    if "--budget-s" in flags:
        # Where less time is left it knows, and begins nothing that it cannot end.
        at = flags.index("--budget-s") + 1
        flags[at] = f"{min(float(flags[at]), limit_s - 15):.0f}"
    out, log = args.folder / f"{name}.json", args.folder / f"{name}.log"
    if args.host_memory and "--host-memory" not in flags:
        flags += ["--host-memory", args.host_memory]
    command = [sys.executable, str(HERE / script), str(out), *flags, *shlex.split(more)]
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    print(f"=== {name}: {shlex.join(command)}", flush=True)
    deadline = time.perf_counter() + limit_s
    with log.open("w") as file:
        # In a group of its own: what it started ends with it.
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        shown = 0
        try:
            while process.poll() is None and time.perf_counter() < deadline:
                time.sleep(0.5)
                shown = show(log, shown)
                if args.zip and int(time.perf_counter()) % 5 == 0:
                    archive(args)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    show(log, shown)
    return process.returncode if process.returncode != -signal.SIGKILL else None


def show(log: Path, shown: int) -> int:
    """Print what a log has gained, and say how far that is."""
    text = log.read_bytes()
    if len(text) > shown:
        print(text[shown:].decode(errors="replace"), end="", flush=True)
    return len(text)


def archive(args: argparse.Namespace) -> None:
    """Write the archive anew, in one piece."""
    if args.zip is None:
        return
    fresh = args.zip.with_suffix(".part")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as z:
        for path in sorted(args.folder.iterdir()):
            if path.suffix in (".json", ".log"):
                z.write(path, path.name)
    fresh.replace(args.zip)


if __name__ == "__main__":
    sys.exit(main())
