"""What was aimed at, and how far the committed results come."""

from __future__ import annotations

from markdown_pieces import Data, table

DECODE_SHARE, DECODE_POINTS, MANY_ROWS = 0.95, 6, 1000
READ_SHARE, MATMUL_SHARE, MIXED_LOSS, LINK_SHARE = 0.85, 0.65, 0.15, 0.90
RATIO = {"pageable": 80, "pinned": 18}
MEMORY_OVER = 0.05
# What may come and go in host memory over a thousand steps without being growth.
GROWTH_BYTES = 16 * 2**20


def targets(data: dict[str, Data]) -> list[str]:
    """A table with a row for each target whose results are there."""
    rows = [
        row
        for name, row_of in (
            ("decode_bound", decode),
            ("decode_bound_whole", decode_whole),
            ("cpu_attention", cpu_attention),
            ("prefill", prefill),
            ("prefill", mixed),
            ("peers", peers),
            ("small_batch", small_batch),
            ("long_run", long_run),
            ("sanitizer", sanitizer),
            ("memory", memory),
        )
        if name in data and (row := row_of(data[name], data)) is not None
    ]
    lines = [[what, reached, "yes" if met else "**no**"] for what, reached, met in rows]
    return ["## Targets", "", *table("target | reached | met", lines)] if lines else []


Row = tuple[str, str, bool] | None


def decode(d: Data, data: dict[str, Data]) -> Row:
    points = d.get("points", [])
    good = [p for p in points if p["share_of_bound"] >= DECODE_SHARE]
    many = [p["share_of_bound"] for p in points if p["strategy"]["B"] >= MANY_ROWS]
    reached = f"{len(good)} of {len(points)} points"
    reached += f"; of {len(many)} with B >= {MANY_ROWS:,} the least {min(many):.1%}" if many else ""
    met = len(good) >= DECODE_POINTS and bool(many) and max(many) >= DECODE_SHARE
    what = f"decode at {DECODE_SHARE:.0%} of the bound for {DECODE_POINTS} points, some of "
    return f"{what}B >= {MANY_ROWS:,}", reached, met


def decode_whole(d: Data, data: dict[str, Data]) -> Row:
    points = d.get("points", [])
    if not points:
        return None
    best = max(points, key=lambda p: p["share_of_bound"])
    reached = f"{best['share_of_bound']:.1%} at B = {best['strategy']['B']:,}, {d['layers']} layers"
    what = f"the same of the whole model at the largest B: {DECODE_SHARE:.0%}"
    return what, reached, best["share_of_bound"] >= DECODE_SHARE


def cpu_attention(d: Data, data: dict[str, Data]) -> Row:
    shares = {p["threads"]: p["share_of_read"] for p in d.get("by_threads", [])}
    errors = d.get("errors", [])
    if not shares or not errors:
        return None
    most = max(shares)
    right = all(p["within"] and p["appended"] for p in errors)
    reached = f"{shares[most]:.1%} with {most} threads, least {min(shares.values()):.1%}; errors "
    reached += "within bounds" if right else "NOT within bounds"
    what = f"CPU attention at {READ_SHARE:.0%} of a streaming read; errors within bounds"
    return what, reached, right and shares[most] >= READ_SHARE


def prefill(d: Data, data: dict[str, Data]) -> Row:
    found = {
        what: max((p["flops_per_s"] for p in points if p["kind"] == "uniform"), default=0.0)
        / max(d["matmul_flops"].values())
        for what, points in (("wave", d.get("points", [])), ("whole job", d.get("jobs", [])))
        if points
    }
    if not found:
        return None
    reached = ", ".join(f"{what} {share:.1%}" for what, share in found.items())
    what = f"prefill of equal prompts at {MATMUL_SHARE:.0%} of the measured matmul rate"
    return what, reached, max(found.values()) >= MATMUL_SHARE


def mixed(d: Data, data: dict[str, Data]) -> Row:
    rates = {p["kind"]: p["tokens_per_s"] for p in d.get("jobs", [])}
    if rates.keys() < {"uniform", "mixed"}:
        return None
    lost = 1 - rates["mixed"] / rates["uniform"]
    return f"mixed prompts lose less than {MIXED_LOSS:.0%}", f"{lost:.1%}", lost < MIXED_LOSS


def peers(d: Data, data: dict[str, Data]) -> Row:
    ours = data.get("decode_bound_whole", {}).get("points", [])
    theirs = {key: d[key]["tokens_per_s"] for key in RATIO if d.get(key)}
    if not ours or not theirs:
        return None
    best = max(p["tokens_per_s"] for p in ours)
    ratios = {key: best / rate for key, rate in theirs.items()}
    what = f"tokens/s over cpu_offload as it comes {RATIO['pageable']}, pinned {RATIO['pinned']}"
    reached = ", ".join(f"{key} {ratio:.1f}" for key, ratio in ratios.items())
    met = len(ratios) == len(RATIO) and all(ratios[key] >= RATIO[key] for key in RATIO)
    return what, reached, met


def small_batch(d: Data, data: dict[str, Data]) -> Row:
    routed = [p for p in d.get("points", []) if p["strategy"]["fetch"] == "routed"]
    # What counts is the choice that a plan makes; the others say what the executor can do.
    plan = {p["strategy"]["B"]: p["share_of_bound"] for p in routed if p["resident"] == "plan"}
    most = {B: max(p["share_of_bound"] for p in routed if p["strategy"]["B"] == B) for B in plan}
    if not plan:
        return None
    reached = ", ".join(f"B = {B}: {x:.1%}, at most {most[B]:.1%}" for B, x in plan.items())
    what = f"small batches, routed, at {LINK_SHARE:.0%} of what must cross the link"
    return what, reached, min(plan.values()) >= LINK_SHARE


def long_run(d: Data, data: dict[str, Data]) -> Row:
    runs = d.get("runs", [])
    if not any(p["seed"] is not None for p in runs):
        return None
    same = all(p["same_tokens"] for p in runs)
    grown = {
        where: max(p[where]["slope_bytes_per_step"] * p["steps"] for p in runs)
        for where in ("host", "gpu")
    }
    reached = "same tokens" if same else "tokens DIFFER"
    reached += "".join(f", {k} {v / 2**20:+.1f} MiB by its slope" for k, v in grown.items())
    met = same and grown["host"] < GROWTH_BYTES and grown["gpu"] <= 0
    what = f"{d['steps']:,} steps: the same tokens with random delays, no growth of memory"
    return what, reached, met


def sanitizer(d: Data, data: dict[str, Data]) -> Row:
    runs = d.get("runs", [])
    if not runs:
        return None
    clean = [p for p in runs if p["clean"]]
    reached = f"{len(clean)} of {len(runs)} runs clean"
    return "compute-sanitizer clean on a small run", reached, len(clean) == len(runs)


def memory(d: Data, data: dict[str, Data]) -> Row:
    points = [p for x in data.values() for p in x.get("points", []) if p.get("gpu_reserved_bytes")]
    points = [p for p in points if "gpu_planned_bytes" in p]
    if not points:
        return None
    over = [p["gpu_planned_bytes"] / p["gpu_reserved_bytes"] - 1 for p in points]
    pinned = sum(
        p["pinned_registered_bytes"] + p["pinned_by_torch_bytes"] == p["pinned_planned_bytes"]
        for p in points
    )
    good = sum(0 <= x <= MEMORY_OVER for x in over)
    reached = f"{good} of {len(over)} ({min(over):+.1%} to {max(over):+.1%}); pinned bytes equal "
    reached += f"in {pinned}"
    what = f"GPU memory predicted within {MEMORY_OVER:.0%}, never below; pinned bytes as planned"
    return what, reached, good == pinned == len(over)
