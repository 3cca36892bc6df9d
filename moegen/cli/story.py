"""What a demonstration did, in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moegen.cli.words import closing, part
from moegen.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from moegen.demo.show import Shown


# What binds where a step waits for no copy.
_COMPUTE = {"lane GPU", "resource gpu"}
# The best ω may be so much above the worst where it hardly matters: predictions of CPU lanes are
# off by more.
_LITTLE = 0.15


def told(shown: Shown) -> Iterator[str]:
    """All of it: the run, the table of operations, where things are, and three lines."""
    from moegen.demo.results import FILES

    yield from closing(shown.report, shown.folder / "answers.jsonl")
    yield ""
    if not shown.report.on_gpu:
        yield "CPU threads stand in here for the GPU and for the link, and share the cores."
    yield f"Predicted against measured: {shown.comparison}"
    yield ""
    yield f"In {shown.folder}:"
    yield from (f"  {name:24} {what}" for name, what in FILES.items())
    yield "To ask the same model something else:"
    yield (
        f"  moegen run --model {shlex.quote(str(shown.checkpoint))} --input requests.jsonl "
        "--output answers.jsonl"
    )
    yield ""
    yield from (f"{i}. {line}" for i, line in enumerate(in_three_lines(shown), start=1))


def in_three_lines(shown: Shown) -> Iterator[str]:
    """What was answered, how well it was predicted, and what bound it."""
    yield _answered(shown)
    yield _predicted(shown)
    yield _bound(shown)


def _answered(shown: Shown) -> str:
    summary, model = shown.report.summary, shown.report.prepared.model
    assert summary is not None
    equal = summary.served - len(shown.differing)
    limit = shown.report.prepared.hardware.gpu_memory_bytes
    named = f" (not: {', '.join(map(str, shown.differing))})" if shown.differing else ""
    return (
        f"{summary.served} of {summary.rows} prompts answered in {format_seconds(summary.time_s)} "
        f"({summary.tokens_per_s:.1f} tokens/s) by a model of {format_bytes(model.weight_bytes)} "
        f"with {format_bytes(limit)} for the GPU: {equal} of {summary.served} texts equal those of "
        f"the dense model that transformers runs{named}."
    )


def _predicted(shown: Shown) -> str:
    c = shown.comparison
    table = c.by_op
    worst = (table["predicted_s"] - table["measured_s"]).abs().idxmax()
    row = table.loc[worst]
    return (
        f"A decode step of the {shown.rows} rows that were left was predicted to take "
        f"{format_seconds(c.predicted_period_s)} and took "
        f"{format_seconds(c.measured_period_s)}: the prediction was {abs(c.error):.0%} too "
        f"{'short' if c.error < 0 else 'long'}. Furthest off is {worst} on lane {row['lane']}: "
        f"{format_seconds(row['predicted_s'])} predicted, {format_seconds(row['measured_s'])} "
        "measured."
    )


def _bound(shown: Shown) -> str:
    plan, curve = shown.report.resolved, shown.curve
    assert plan is not None
    omega = plan.plan.decode.omega
    speeds = {
        source: rows.set_index("omega")["decode_tokens_per_s"]
        for source, rows in curve.groupby("source")
    }
    predicted, measured = speeds["predicted"], speeds["measured"]
    share = shown.bound.seconds / shown.comparison.measured_period_s
    return (
        f"By the machine's rates no such step is shorter than "
        f"{format_seconds(shown.bound.seconds)}, {share:.0%} of what it took, because of "
        f"{part(shown.bound.binds)}. The plan took ω = {omega:g} (the share of "
        f"attention on the CPU): {predicted[omega]:.1f} tokens/s predicted and "
        f"{measured[omega]:.1f} measured with these rows; the best of the curve are "
        f"{predicted.max():.1f} predicted at {predicted.idxmax():g} and {measured.max():.1f} "
        f"measured at {measured.idxmax():g}.{_whether_it_matters(shown)}"
    )


def _whether_it_matters(shown: Shown) -> str:
    """That ω hardly matters without a GPU, where both clocks say so; else nothing.

    What attention on the CPU saves is copies over a link. On CPU lanes they are copies within host
    memory, so where the lane that computes binds at every ω there is nothing to gain by them.
    """
    curve = shown.curve
    above: dict[str, float] = {}
    for source, rows in curve.groupby("source"):
        speeds = [float(speed) for speed in rows["decode_tokens_per_s"]]
        above[str(source)] = max(speeds) / min(speeds) - 1
    if shown.report.on_gpu or len(set(curve["omega"])) < 2:
        return ""
    if not set(curve["binds"]) <= _COMPUTE or max(above.values()) > _LITTLE:
        return ""
    return (
        f" The choice matters little here: the best of the curve is {above['predicted']:.0%} above "
        f"the worst by prediction, {above['measured']:.0%} measured. Without a GPU nothing crosses "
        f"a link: attention on the CPU saves copies within host memory, and it is the GPU lane "
        f"that limits a step at every ω."
    )
