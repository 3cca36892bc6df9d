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
        f"streamed every step, so that the link is what binds. Period: `period_s` of the "
        f"measured Timeline, over {len(decode['points'][0]['steps_s']) + 1} steps. Bound: "
        f"`moegen.bound_s` at the rates below, measured in the same run with their neighbours "
        f"running, and once more at those of each resource alone. Predicted: `moegen.simulate` "
        f"at the rates of each resource alone.",
        "",
        "| ω | b_a | period | tokens/s | bound | binds | share | share, rates alone | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in decode["points"]:
        s = p["strategy"]
        lines.append(
            f"| {s['omega']:g} | {s['b_a']} | {_ms(p['period_s'])} | {p['tokens_per_s']:,.0f} | "
            f"{_ms(p['bound_s'])} | {p['binds']} | {p['share_of_bound']:.1%} | "
            f"{p['share_of_bound_at_rates_alone']:.1%} | {_ms(p['predicted_period_s'])} |"
        )
    shares = ("share_of_bound", "share_of_bound_at_rates_alone")
    least = min(p[name] for p in decode["points"] for name in shares)
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
    matmul = (
        f"| bf16 matmul, 4096 x 4096 x 4096 | {rates['bf16_matmul_flops'] / 1e12:.0f} TFLOP/s |"
    )
    return ["## Rates of the same run", "", "| what | rate |", "|---|---|", *rows, matmul, ""]


def _bf16() -> list[str]:
    r = _load("bf16_error")
    lines = [
        "## bf16 against float32",
        "",
        f"{r['layers']} layers at true width, prompts of {', '.join(map(str, r['prompts']))} "
        f"tokens, {r['tokens']} teacher-forced tokens each. Reference: transformers in float32 "
        f"on the same weights. A row is *sure* where the reference's margin exceeds four times "
        f"transformers' largest error.",
        "",
        "| router | who | largest error | rms | to transformers' | same argmax | sure | "
        "same where sure |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for router in ("clear", "random"):
        part = r[router]
        rows, sure = part["rows"], part["rows_with_margin_above_4x_error"]
        x = part["transformers"]
        lines.append(
            f"| {router} | transformers | {x['max_abs']:.3g} | {x['rms']:.3g} | | "
            f"{x['same_argmax']} of {rows} | {sure} | |"
        )
        for x in part["runs"]:
            lines.append(
                f"| {router} | moegen, ω = {x['omega']:g} | {x['max_abs']:.3g} | {x['rms']:.3g} | "
                f"{x['max_abs_ratio']:.2f} largest, {x['rms_ratio']:.2f} rms | "
                f"{x['same_argmax']} of {rows} | {sure} | "
                f"{('yes' if x['same_argmax_where_sure'] else 'NO') if sure else 'none is sure'} |"
            )
    return [
        *lines,
        "",
        "A random router's near ties flip in any bf16 run, and one expert more or less outweighs "
        "all rounding: its errors are luck. A router that tokens decide clearly compares the "
        "arithmetic.",
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
