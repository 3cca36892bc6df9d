"""Sections of the report that tell of memory and of right results."""

from __future__ import annotations

from markdown_pieces import Data, gib, left_out, table, where


def long_run(d: Data, data: dict[str, Data]) -> list[str]:
    s = d["strategy"]
    lines = [
        "## A long run",
        "",
        *where(d),
        f"{d['steps']:,} decode steps of {d['layers']} layers of {d['model']}, B = {s['B']}, "
        f"ω = {s['omega']:g}, {gib(s['s_params'])} kept on the GPU; without delays, and with "
        f"random ones on both sides of every lane. Memory is sampled at every step; spread and "
        f"slope are over all but the first 100.",
        "",
    ]
    rows = [
        [
            "none" if p["seed"] is None else f"seed {p['seed']}",
            f"{p['took_s']:.1f} s",
            f"{p['tokens']:,}",
            "yes" if p["same_tokens"] else f"NO: {p['rows_that_differ']} rows differ",
            *(
                f"{p[x]['spread_bytes'] / 2**20:.1f} MiB, "
                f"{p[x]['slope_bytes_per_step'] / 1024:+.2f} KiB a step"
                for x in ("host", "gpu")
            ),
        ]
        for p in d.get("runs", ())
    ]
    return [
        *lines,
        *table("delays | took | tokens | same tokens | host memory | GPU memory", rows),
    ]


def sanitizer(d: Data, data: dict[str, Data]) -> list[str]:
    lines = [
        "## compute-sanitizer",
        "",
        *where(d),
        "A short `long_run.py` of tiny models under each tool, random delays too, memory not "
        "cached by torch.",
        "",
    ]
    rows = [
        [
            p["tool"],
            p["model"],
            "did not end" if p["exit_code"] is None else str(p["exit_code"]),
            "; ".join(p["summary"]) or "none",
            ", ".join(p["kernels"]),
        ]
        for p in d.get("runs", ())
    ]
    columns = "tool | model | exit code | summary | kernels named"
    return [*lines, *table(columns, rows), *left_out(d)]


def memory(d: Data, data: dict[str, Data]) -> list[str]:
    lines = [
        "## Memory, predicted and taken",
        "",
        *where(d),
        "GPU: `moegen.memory(...).gpu.total_bytes` against `torch.cuda.max_memory_reserved()`. "
        "Pinned: what the plan has in pinned host memory against what was registered, and what "
        "torch's allocator of pinned memory gave out.",
        "",
    ]
    rows = [
        [
            f"{p['model']}, {p['layers']} layers",
            gib(p["cap_bytes"]),
            p["what"],
            ", ".join(f"{k} = {v}" for k, v in p["fixed"].items()) or "auto",
            *_taken(p),
        ]
        for p in d.get("points", ())
    ]
    columns = "model | cap | run | plan | planned | reserved | over | pinned, planned | pinned"
    return [*lines, *table(columns, rows), *_least_over(d.get("points", [])), *left_out(d)]


def other_memory(d: Data, data: dict[str, Data]) -> list[str]:
    """Memory of the points of other sections."""
    rows, points = [], []
    for name in ("decode_bound", "decode_bound_whole", "small_batch"):
        d = data.get(name, {})
        for p in d.get("points", ()):
            if "gpu_planned_bytes" not in p:
                continue
            s = p["strategy"]
            points.append(p)
            what = f"B = {s['B']:,}, ω = {s['omega']:g}, b_a = {s['b_a']}, {s['fetch']}"
            rows.append([f"{d['layers']} layers", what, *_taken(p)])
    if not rows:
        return []
    columns = "model | point | planned | reserved | over | pinned, planned | pinned"
    head = ["## Memory of the points above", "", "As in the section before, or as it would be.", ""]
    return [*head, *table(columns, rows), *_least_over(points)]


def _taken(p: Data) -> list[str]:
    planned, reserved = p["gpu_planned_bytes"], p["gpu_reserved_bytes"]
    taken = p["pinned_registered_bytes"] + p["pinned_by_torch_bytes"]
    return [
        gib(planned),
        "" if reserved is None else gib(reserved),
        "" if not reserved else f"{planned / reserved - 1:+.1%}",
        gib(p["pinned_planned_bytes"]),
        f"{gib(taken)} ({taken - p['pinned_planned_bytes']:+,} B)",
    ]


def _least_over(points: list[Data]) -> list[str]:
    over = [
        p["gpu_planned_bytes"] / p["gpu_reserved_bytes"] - 1
        for p in points
        if p["gpu_reserved_bytes"]
    ]
    if not over:
        return []
    good = sum(0 <= x <= 0.05 for x in over)
    return [
        f"Planned over reserved: {min(over):+.1%} to {max(over):+.1%}; {good} of {len(over)} "
        f"within 0 and 5%.",
        "",
    ]


def bf16(r: Data, data: dict[str, Data]) -> list[str]:
    lines = [
        "## bf16 against float32",
        "",
        f"{r['layers']} layers at true width, prompts of {', '.join(map(str, r['prompts']))} "
        f"tokens, {r['tokens']} teacher-forced tokens each. Reference: transformers in float32 "
        f"on the same weights. A row is *sure* where the reference's margin exceeds four times "
        f"transformers' largest error.",
        "",
    ]
    rows = []
    for router in ("clear", "random"):
        part = r[router]
        n, sure = part["rows"], part["rows_with_margin_above_4x_error"]
        x = part["transformers"]
        error = [f"{x['max_abs']:.3g}", f"{x['rms']:.3g}"]
        same = f"{x['same_argmax']} of {n}"
        rows.append([router, "transformers", *error, "", same, f"{sure}", ""])
        for x in part["runs"]:
            rows.append(
                [
                    router,
                    f"moegen, ω = {x['omega']:g}",
                    f"{x['max_abs']:.3g}",
                    f"{x['rms']:.3g}",
                    f"{x['max_abs_ratio']:.2f} largest, {x['rms_ratio']:.2f} rms",
                    f"{x['same_argmax']} of {n}",
                    f"{sure}",
                    ("yes" if x["same_argmax_where_sure"] else "NO") if sure else "none is sure",
                ]
            )
    return [
        *lines,
        *table(
            "router | who | largest error | rms | to transformers' | same argmax | sure | "
            "same where sure",
            rows,
        ),
        "A random router's near ties flip in any bf16 run, and one expert more or less outweighs "
        "all rounding: its errors are luck. A router that tokens decide clearly compares the "
        "arithmetic.",
        "",
    ]


def kernels(k: Data, data: dict[str, Data]) -> list[str]:
    wrong = sum(not line["ok"] for line in k["lines"])
    return [
        "## Kernels",
        "",
        f"{len(k['lines'])} checks of the zero-copy and attention kernels against torch, "
        f"{wrong} wrong; each with its time in `results/kernels.json`.",
        "",
    ]
