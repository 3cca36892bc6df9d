"""compute-sanitizer over a short run of tiny models: every kernel that a job launches.

    python benchmarks/h200/sanitizer.py OUT.json [--tools memcheck racecheck]

Each tool runs ``long_run.py`` in a process of its own, with random delays too. Memory that torch
caches is not cached then, so that a tool sees every buffer's end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Results, parser, say

FOUND = 97  # exit code where a tool finds something
HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__, budget_s=240)
    p.set_defaults(layers=2)
    p.add_argument("--tools", nargs="+", default=("memcheck", "racecheck"))
    p.add_argument("--models", nargs="+", default=("tiny", "tiny-latent"))
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--each-s", type=float, default=30)
    p.add_argument("--command", default="compute-sanitizer", help="the tool, or one in its place")
    args = p.parse_args(argv)
    out = Results(args)
    found = shutil.which(args.command)
    if found is None:
        out.put(failed=[f"{args.command} is not installed"])
        say(out.data["failed"][0])
        return
    runs = [(tool, model) for tool in args.tools for model in args.models]
    for tool, model in out.within(runs, args.each_s):
        out.add(check(found, tool, model, args, out.left_s), to="runs")
    out.done()


def check(command: str, tool: str, model: str, args: Any, left_s: float) -> dict[str, Any]:
    """Run one tool over one model."""
    raw = args.out.with_name(f"sanitizer_{tool}_{model}.tmp.json")
    work = [sys.executable, str(HERE / "long_run.py"), str(raw), "--device", args.device]
    work += ["--model", model, "--layers", str(args.layers), "--B", "8", "--prompt-len", "24"]
    work += ["--steps", str(args.steps), "--resident", "0.3", "--gpu-memory", "2GiB"]
    tool_flags = [command, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    try:
        done = subprocess.run(
            [*tool_flags, *work],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=left_s,
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as e:
        code, text = None, (e.stdout or b"").decode(errors="replace")
    finally:
        raw.unlink(missing_ok=True)
    lines = text.splitlines()
    summary = [x.strip("= ") for x in lines if "SUMMARY" in x]
    kernels = Counter(m[1] for x in lines if (m := re.search(r"\bat (\S+?)[+(<]", x)))
    result = {
        "tool": tool,
        "model": model,
        "exit_code": code,
        "clean": code == 0,
        "summary": summary,
        "kernels": dict(kernels.most_common(10)),
        "tail": [x for x in lines[-30:] if raw.name not in x],
    }
    ended = {None: "did not end", 0: "clean", FOUND: "found something"}
    say(f"{tool} over {model}: {ended.get(code, f'exit code {code}')} {summary}")
    return result


if __name__ == "__main__":
    main()
