"""How far the time of each op is predicted: what takes long first, all else folded."""

from __future__ import annotations

import judge
from judge import LONG, Data
from markdown_pieces import folded, pct, short, signed, table


def ops(points: list[Data]) -> list[str]:
    """The section on ops, of all points."""
    found = judge.by_op(points)
    columns, rows = _long(found)
    missing = [r for r in found if not r["met"] and r["share"] >= LONG]
    return [
        "## Ops",
        "",
        f"Ops that take {LONG:.0%} of a step or more, by model and phase: the median error over "
        f"points of the seconds of all its tasks, then the share of the step. +: predicted too "
        f"slow in {judge.ONE_SIDED:.0%} of points or more, -: too fast, ±: either. **Bold**: "
        f"misses {judge.OP_MEDIAN:.0%}. Lanes run beside one another, so shares add up to more "
        f"than 100%.",
        "",
        *table(columns, rows),
        "Those that miss, and what the data show:" if missing else "None misses.",
        "",
        *(f"- {_name(r)}: {r['why']}" for r in missing),
        *([""] if missing else []),
        *folded(
            f"All {len(found)} of every model and phase, those that take less too", _all(found)
        ),
    ]


def _long(found: list[Data]) -> tuple[str, list[list[str]]]:
    """A row an op, a column a model and phase."""
    kinds = sorted({(r["model"], r["phase"]) for r in found}, key=lambda k: (k[1], k[0]))
    cells = {(r["op"], r["model"], r["phase"]): r for r in found if r["share"] >= LONG}
    lanes = {op: r["lane"] for (op, *_), r in cells.items()}
    rows = [
        [f"`{op}`", lane, *(_cell(cells.get((op, *kind))) for kind in kinds)]
        for op, lane in lanes.items()
    ]
    return " | ".join(["op", "lane", *(" ".join(kind) for kind in kinds)]), rows


def _cell(row: Data | None) -> str:
    if row is None:
        return ""
    error = f"{'-±+'[row['sign'] + 1]}{pct(row['median'])}"
    return f"{error if row['met'] else f'**{error}**'} of {row['share']:.0%}"


def _all(found: list[Data]) -> list[str]:
    rows = [
        [
            f"`{r['op']}`",
            r["lane"],
            r["model"],
            r["phase"],
            str(r["points"]),
            pct(r["share"]),
            short(r["task_s"]),
            pct(r["median"]),
            signed(r["signed"]),
            f"{r['of_step']:+.2%}",
            "-" if r["spread"] is None else pct(r["spread"]),
            r["why"],
        ]
        for r in found
    ]
    columns = (
        "op | lane | model | phase | points | share of a step | a task | median error | "
        "with its sign | of a step | run to run | where it misses"
    )
    return [
        "Predicted is the mean over the steps, measured the median, task by task. The error is "
        "the median over points, without and with its sign, and with its sign as a share of the "
        "step. Run to run: by how much the op's time differs between the runs of a point, in the "
        "median.",
        "",
        *table(columns, rows),
    ]


def _name(row: Data) -> str:
    return f"`{row['op']}`, {row['model']} {row['phase']}"
