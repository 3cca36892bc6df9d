"""Write REPORT.md beside this file from the raw results; a test checks that it is up to date.

python benchmarks/h200/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
REPORT = HERE / "REPORT.md"


def report() -> str:
    """The report as Markdown."""
    decode = _load("decode_bound")
    return "\n".join([*_head(decode), *_decode(decode), *_rates(decode), *_bf16(), *_kernels()])


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _head(decode: dict[str, Any]) -> list[str]:
    m = decode["machine"]
    return [
        "# Measured on one H200",
        "",
        f"{m['gpu']}, {m['cpu_threads']} CPU threads for attention, torch {m['torch']}, Python "
        f"{m['python']}, {m['date']}. Written by `report.py` from `results/`; the scripts beside "
        f"it make those.",
        "",
    ]


def _decode(decode: dict[str, Any]) -> list[str]:
    lines = [
        "## Decode against the bound",
        "",
        f"{decode['layers']} layers of {decode['model']} at true width, random weights, "
        f"B = {decode['B']}, context {decode['context']}, expert slots for one layer, weights "
        f"streamed every step. Period: mean over the steps after the first three, from the "
        f"measured Timeline. Bound: `moegen.bound_s` at the rates below, measured in the same "
        f"run with their neighbours running. Predicted: `moegen.simulate` at the rates of each "
        f"resource alone.",
        "",
        "| ω | b_a | period | tokens/s | bound | binds | share of the bound | predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in decode["points"]:
        s = p["strategy"]
        lines.append(
            f"| {s['omega']:g} | {s['b_a']} | {_ms(p['period_s'])} | {p['tokens_per_s']:,.0f} | "
            f"{_ms(p['bound_s'])} | {p['binds']} | {p['share_of_bound']:.1%} | "
            f"{_ms(p['predicted_period_s'])} |"
        )
    least = min(p["share_of_bound"] for p in decode["points"])
    return [*lines, "", f"The least share is {least:.1%}.", ""]


def _rates(decode: dict[str, Any]) -> list[str]:
    says = {
        "h2d_alone": "weights up by the copy engine, alone",
        "h2d_with_cpu_attn": "the same while the CPU attends",
        "cpu_attn_alone": "CPU decode attention over its KV, alone",
        "cpu_attn_with_h2d": "the same while weights go up",
        "gather_alone": "KV gathered by a zero-copy kernel, alone",
        "gather_with_h2d": "the same while weights go up",
    }
    rates = decode["rates_bytes_per_s"]
    rows = [f"| {text} | {rates[name] / 1e9:.1f} GB/s |" for name, text in says.items()]
    matmul = f"| bf16 matmul, 4096 x 4096 x 4096 | {rates['bf16_matmul_flops'] / 1e12:.0f} TFLOP/s |"
    return ["## Rates of the same run", "", "| what | rate |", "|---|---|", *rows, matmul, ""]


def _bf16() -> list[str]:
    r = _load("bf16_error")
    theirs = r["transformers"]
    lines = [
        "## bf16 against float32",
        "",
        f"{r['layers']} layers at true width, prompts of {', '.join(map(str, r['prompts']))} "
        f"tokens, {r['tokens']} teacher-forced tokens each. Reference: transformers in float32 "
        f"on the same weights. transformers' own bf16 run is off by {theirs['max_abs']:.3g} at "
        f"most and {theirs['rms']:.3g} rms.",
        "",
        "| ω | largest error | rms | largest, to theirs | rms, to theirs | same argmax | "
        "theirs | same wherever sure |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in r["runs"]:
        lines.append(
            f"| {x['omega']:g} | {x['max_abs']:.3g} | {x['rms']:.3g} | {x['max_ratio']:.2f} | "
            f"{x['rms_ratio']:.2f} | {x['argmax_same']} of {x['rows']} | "
            f"{x['argmax_same_transformers']} | {'yes' if x['argmax_same_where_sure'] else 'NO'} |"
        )
    sure = r["margin_exceeds_4x_error"]
    return [
        *lines,
        "",
        f"With random weights the router's near ties flip, and errors are large on both sides: "
        f"the margin exceeds four times transformers' largest error in {sure} of "
        f"{r['runs'][0]['rows']} rows.",
        "",
    ]


def _kernels() -> list[str]:
    k = _load("kernels")
    wrong = sum(not line["ok"] for line in k["lines"])
    return [
        "## Kernels",
        "",
        f"{len(k['lines'])} checks of the zero-copy and attention kernels against torch, "
        f"{wrong} wrong; each with its time in `results/kernels.json`.",
        "",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    REPORT.write_text(report(), encoding="utf-8")
