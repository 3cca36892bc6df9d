"""Sections of the report that tell of speed."""

from __future__ import annotations

from markdown_pieces import Data, gb, gib, left_out, ms, table, tera, where


def decode(d: Data, data: dict[str, Data]) -> list[str]:
    lines = [
        "## Decode against the bound",
        "",
        *where(d),
        f"{d['layers']} layers of {d['model']} at true width, random weights, context "
        f"{d['context']}, expert slots for one layer. Period: `period_s` of the measured Timeline. "
        f"Bound: the largest of the least time that link and CPU need for the step's bytes, "
        f"whatever of them runs side by side (at the rates below, all measured in the same run), "
        f"of each lane's and resource's work over its rate alone, and of layers times one layer's "
        f"dependency chain. *Rates alone*: without the first. Predicted: `moegen.simulate` at the "
        f"rates alone.",
        "",
    ]
    rows = []
    for p in d.get("points", ()):
        s = p["strategy"]
        rows.append(
            [
                f"{s['B']:,}",
                f"{s['omega']:g}",
                f"{s['b_a']}",
                gib(s["s_params"]),
                ms(p["period_s"]),
                f"{p['tokens_per_s']:,.0f}",
                ms(p["bound_s"]),
                p["binds"],
                f"{p['share_of_bound']:.1%}",
                f"{p['share_of_bound_at_rates_alone']:.1%}",
                ms(p["predicted_period_s"]),
            ]
        )
    lines += table(
        "B | ω | b_a | kept | period | tokens/s | bound | binds | share | rates alone | predicted",
        rows,
    )
    shares = [p["share_of_bound"] for p in d.get("points", ())]
    if shares:
        enough = sum(x >= 0.95 for x in shares)
        lines += [f"The least share is {min(shares):.1%}; {enough} of {len(shares)} reach 95%.", ""]
    notes = [f"- {note}" for note in d.get("notes", ())]
    return [*lines, *left_out(d), *(notes and [*notes, ""]), *_loading(d), *_rates(d)]


def whole(d: Data, data: dict[str, Data]) -> list[str]:
    lines = decode(d, data)
    return [lines[0].replace("Decode against", "Decode of the whole model against"), *lines[1:]]


def _loading(d: Data) -> list[str]:
    if "register_s" not in d:
        return []
    n, load_s, register_s = d["weights_bytes"], d["load_s"], d["register_s"]
    pinned = "" if d["pinned"] else "; NOT pinned"
    return [
        f"Weights: {gib(n)} made, touched and registered in {load_s:.1f} s, "
        f"{n / load_s / 2**30:.1f} GiB/s; registering took {register_s:.1f} s of it, "
        f"{n / register_s / 2**30:.1f} GiB/s{pinned}."
        if register_s
        else f"Weights: {gib(n)} made in {load_s:.1f} s{pinned}.",
        "",
    ]


def _rates(d: Data) -> list[str]:
    says = {"weights": "weights, copied", "gather": "KV, gathered", "attention": "CPU attention"}
    rates = d.get("rates_bytes_per_s", {})
    rows = [
        [mode.replace("+", ", "), *(f"{gb(by[who])} GB/s" if who in by else "" for who in says)]
        for mode, by in rates.items()
    ]
    if not rows:
        return []
    flops = d.get("bf16_matmul_flops")
    lines = ["Rates of the same run, of what runs side by side:", ""]
    lines += table(f"at work | {' | '.join(says.values())}", rows)
    return lines + ([f"bf16 matmul of 4096: {tera(flops)} TFLOP/s.", ""] if flops else [])


def cpu_attention(d: Data, data: dict[str, Data]) -> list[str]:
    lines = [
        "## Decode attention on the CPU",
        "",
        *where(d),
        f"{d['heads'][0]} query heads in {d['heads'][1]} groups of {d['heads'][2]}, bf16, beside "
        f"nothing else. *Read*: a plain vectorised read of the same memory by the same threads. "
        f"The target is 85% of it at B = {d['B']}, context {d['context']}.",
        "",
    ]
    kinds = {"by_threads": "equal", "mixed": "mixed"}
    rows = [
        [
            kinds[key] if key == "by_threads" else f"1 to {p['longest']:,}",
            f"{p['rows']:,}",
            f"{p['threads']}",
            p["kind"],
            f"{gb(p['kv_bytes_per_s'])} GB/s",
            f"{gb(p['read_bytes_per_s'])} GB/s",
            f"{p['share_of_read']:.1%}",
        ]
        for key in kinds
        for p in d.get(key, ())
    ]
    lines += table("lengths | rows | threads | kernel | KV read | read | share", rows)
    rows = [
        [
            f"{p['rows']}",
            f"{p['threads']}",
            p["kind"],
            f"{p['flops_per_s'] / 1e9:,.0f} GFLOP/s",
            f"{gb(p['kv_bytes_per_s'])} GB/s",
        ]
        for p in d.get("latent", ())
    ]
    if rows:
        lines += ["Absorbed latent attention, 128 heads on 512 + 64:", ""]
        lines += table("rows | threads | kernel | arithmetic | latents read", rows)
    rows = [
        [
            p["heads"],
            p["dtype"],
            f"{p['longest']:,}",
            f"{p['max_abs']:.2g}",
            f"{p['beyond_rounding']:.2g}",
            "yes" if p["within"] and p["appended"] else "NO",
        ]
        for p in d.get("errors", ())
    ]
    if rows:
        lines += [
            "Errors against float64, lengths from 1 to the longest. *Beyond rounding*: what is "
            "left of the error once half a unit in the output's last place is taken off; it must "
            "stay under 1e-5.",
            "",
        ]
        lines += table("heads | dtype | longest | largest error | beyond rounding | within", rows)
    return [*lines, *left_out(d)]


def prefill(d: Data, data: dict[str, Data]) -> list[str]:
    best = max(d["matmul_flops"].values())
    measured = ", ".join(f"{k}: {tera(v)} TFLOP/s" for k, v in d["matmul_flops"].items())
    low, high = d["mixed"]
    lines = [
        "## Prefill",
        "",
        *where(d),
        f"{d['layers']} layers of {d['model']}, all weights streamed in every wave, "
        f"{gib(d['gpu_memory_bytes'])} of GPU memory. Prompts of {d['prompt_len']} tokens, and of "
        f"{low} to {high:,}, log-uniform, of the same total. FLOP/s: the graph's work over the "
        f"period of a repeated wave; whole jobs go through `generate`, over the time of their "
        f"prefill. Share: of the best bf16 matmul of the same run ({measured}).",
        "",
    ]
    rows = [
        [
            f"wave, {p['kind']}",
            f"{p['rows']:,}",
            f"{p['tokens']:,}",
            ms(p["period_s"]),
            f"{p['tokens_per_s']:,.0f}",
            f"{tera(p['flops_per_s'])} TFLOP/s",
            f"{p['flops_per_s'] / best:.1%}",
            f"{gb(p['streamed_bytes_per_s'])} GB/s",
        ]
        for p in d.get("points", ())
    ]
    rows += [
        [
            f"job, {p['kind']}, {p['waves']} waves",
            f"{p['rows']:,}",
            f"{p['tokens']:,}",
            f"{p['prefill_s']:.2f} s",
            f"{p['tokens_per_s']:,.0f}",
            f"{tera(p['flops_per_s'])} TFLOP/s",
            f"{p['flops_per_s'] / best:.1%}",
            "",
        ]
        for p in d.get("jobs", ())
    ]
    lines += table("what | prompts | tokens | time | tokens/s | rate | share | weights", rows)
    lines += [
        f"- out of memory or room: {p['kind']}, {p['tokens']:,} tokens: {p['error']}"
        for p in d.get("failed_waves", ())
    ]
    losses = []
    for name, points in (("waves", d.get("points", ())), ("jobs", d.get("jobs", ()))):
        by = {(p["kind"], p["tokens"]): p["tokens_per_s"] for p in points}
        lost = [
            1 - by["mixed", n] / rate
            for (kind, n), rate in by.items()
            if kind == "uniform" and ("mixed", n) in by
        ]
        if lost:
            losses.append(f"{name} {', '.join(f'{x:.1%}' for x in lost)}")
    if losses:
        lines += [f"Tokens/s that mixed prompts lose against equal ones: {'; '.join(losses)}.", ""]
    return [*lines, *left_out(d)]


def peers(d: Data, data: dict[str, Data]) -> list[str]:
    lines = [
        "## transformers + accelerate `cpu_offload`",
        "",
        *where(d),
        f"{d['layers']} layers of {d['model']}, {gib(d['weights_bytes'])} of weights in host "
        f"memory, transformers {d['transformers']} (attention {d['attention']}, experts "
        f"{d['experts']}), accelerate {d['accelerate']}, under {gib(d['gpu_memory_bytes'])} of "
        f"GPU memory. The batch is the largest that plain `generate()` completes at prompt "
        f"{d['prompt_len']}, with room for {d['gen_len']} new tokens at its end. Decode is timed "
        f"in the middle of the answers.",
        "",
    ]
    rows = [
        [
            name,
            f"{p['B']}",
            f"{p['context']}",
            f"{p['step_s']:.2f} s",
            f"{p['step_s'] / d['layers'] * 1e3:.0f} ms",
            f"{p['tokens_per_s']:.2f}",
        ]
        for key, name in (("pageable", "as it comes"), ("pinned", "parameters pinned by hand"))
        if (p := d.get(key))
    ]
    lines += table("offload | batch | context | decode step | a layer | tokens/s", rows)
    bad = d.get("smallest_that_fails")
    if d.get("prefill_s"):
        tokens = d["largest_batch"] * d["prompt_len"]
        lines += [
            f"One-shot prefill at that batch, pinned: {d['prefill_s']:.2f} s, "
            f"{tokens / d['prefill_s']:,.0f} tokens/s. The smallest batch seen to fail: "
            f"{'none' if bad is None else bad}.",
            "",
        ]
    return [*lines, *left_out(d)]


def against_peers(peers: Data, data: dict[str, Data]) -> list[str]:
    ours = data.get("decode_bound_whole", {})
    if not ours.get("points") or peers["layers"] != ours["layers"]:
        return []
    best = max(ours["points"], key=lambda p: p["tokens_per_s"])
    lines = [
        "## Against the peers, the whole model",
        "",
        f"Decode of all {ours['layers']} layers, the same widths, cap and kind of machine: "
        f"{best['tokens_per_s']:,.0f} tokens/s at B = {best['strategy']['B']:,}, "
        f"ω = {best['strategy']['omega']:g}.",
        "",
    ]
    rows = [
        [name, f"{p['tokens_per_s']:.2f}", f"{best['tokens_per_s'] / p['tokens_per_s']:.1f}"]
        for key, name in (("pageable", "as it comes"), ("pinned", "parameters pinned by hand"))
        if (p := peers.get(key))
    ]
    return [*lines, *table("cpu_offload | tokens/s | ratio", rows)]


def small_batch(d: Data, data: dict[str, Data]) -> list[str]:
    lines = [
        "## Small batches",
        "",
        *where(d),
        f"{d['layers']} layers of {d['model']}, context {d['context']}. Bound: the bytes that a "
        f"step really copied to the GPU, by its own routing, over the link's rate in the same run "
        f"({gb(d['link_bytes_per_s'])} GB/s). *Kept*: what S_Params keeps of these layers: "
        f"nothing, the dense weights, or what a plan for all layers could keep.",
        "",
    ]
    rows = [
        [
            f"{p['strategy']['B']}",
            p["strategy"]["fetch"],
            f"{p['resident']} ({gib(p['strategy']['s_params'])})",
            ms(p["period_s"]),
            f"{p['tokens_per_s']:.1f}",
            f"{p['h2d_bytes'] / 1e9:.2f} GB",
            ms(p["bound_s"]),
            f"{p['share_of_bound']:.1%}",
        ]
        for p in d.get("points", ())
    ]
    columns = "B | fetch | kept | period | tokens/s | copied | bound | share"
    return [*lines, *table(columns, rows), *left_out(d)]
