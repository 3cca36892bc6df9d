"""What delays do to a step, predicted and measured."""

from __future__ import annotations

import judge
from judge import NONE, SLOPE, Data
from markdown_pieces import short, signed, table

HEAD = ["## Delays", ""]


def delays(slopes: Data | None, why: Data | None = None) -> list[str]:
    """The section on injected delays; ``why`` those of some ``ops`` differ that do not bind."""
    if slopes is None or not (found := judge.slope_rows(slopes)):
        return [*HEAD, "They have not been measured.", ""]
    rows = [
        [
            r["situation"],
            f"`{r['op']}`",
            r["lane"],
            str(r["tasks"]),
            short(r["delay_s"]),
            _share(r["predicted"], r),
            f"{_share(r['measured'], r)} ± {_share(r['within'], r)}",
            "yes" if r["binds"] else "no",
            _verdict(r),
            signed(r["error"]) if r["binds"] and r["error"] is not None else "-",
        ]
        for r in found
    ]
    columns = (
        "situation | op | lane | tasks | delay of each | predicted slope by task | measured | "
        "binds | agree in sign | error where it binds"
    )
    return [
        *HEAD,
        f"All tasks of an op are held back, op by op, of {slopes['layers']} layers of "
        f"{slopes['model']}, in situations in which other things bind:",
        "",
        *(_situation(s) for s in slopes["situations"]),
        "",
        "The slope by task is how much of the delay of all tasks of an op a step is longer by: 1 "
        "if every second of it shows, 0 if there is slack for it. (`moegen.causal` gives it times "
        "the tasks, seconds of a step for each second before every task.) An op binds if it is "
        "predicted to be at least a half. Behind ± stand two standard errors, from how repeated "
        "stretches of steps differ.",
        "",
        f"**Agree in sign**: both above 0, both below 0, or both none, or no further apart than "
        f"two standard errors or {NONE:g}. None is a slope by task of {NONE:g} or less, measured "
        f"also one within two standard errors of 0. **Cannot be told**: it agrees by that, but "
        f"several signs lie within two standard errors of what was measured, so that many a "
        f"prediction would agree. **On the edge**: two standard errors are less than {NONE:g}, "
        f"and on both sides of it.",
        "",
        *table(columns, rows),
        *_listed("Where the sign is on the edge, cannot be told, or is another:", _doubtful(found)),
        *_listed(f"Where an op that binds is off by more than {SLOPE:.0%}:", _far(found)),
        *_unforeseen(found, why),
    ]


def _verdict(row: Data) -> str:
    if not row["agrees"]:
        return "**no**"
    if row["told"]:
        return "yes"
    return "on the edge" if row["edge"] else "cannot be told"


def _doubtful(found: list[Data]) -> list[Data]:
    return [r for r in found if _verdict(r) != "yes"]


def _unforeseen(found: list[Data], why: Data | None) -> list[str]:
    """Where nothing binds and a step is longer or shorter all the same, by more than the noise."""
    rows = [
        r for r in found if not r["binds"] and abs(r["measured"] - r["predicted"]) > r["within"]
    ]
    if not rows:
        return []
    head = (
        "Where nothing binds, and what was measured is further from what was predicted than two "
        "standard errors:"
    )
    known = why is not None and {r["op"] for r in rows} <= set(why["ops"])
    return [*_listed(head, rows), *([why["why"], ""] if why is not None and known else [])]


def _far(found: list[Data]) -> list[Data]:
    return [r for r in found if r["binds"] and not judge.is_close(r)]


def _listed(head: str, rows: list[Data]) -> list[str]:
    if not rows:
        return []
    lines = [
        f"- {r['situation']}, `{r['op']}`: predicted {_share(r['predicted'], r)}, measured "
        f"{_share(r['measured'], r)} ± {_share(r['within'], r)}"
        for r in rows
    ]
    return [head, "", *lines, ""]


def _share(x: float, row: Data) -> str:
    """As many digits as two standard errors of the row have."""
    digits = 2 if row["within"] >= 0.02 else 3
    none = f"{0:.{digits}f}"
    return f"{x:.{digits}f}".replace(f"-{none}", none)


def _situation(of: Data) -> str:
    s = of["strategy"]
    slots = f"{s['kv_slots']} slot{'s' * (s['kv_slots'] > 1)} for KV"
    return (
        f"- {judge.title(of)}: B = {s['B']:,}, b_a = {s['b_a']}, {slots}, "
        f"{of['context']:,} tokens of context, ω = {s['omega']:g}; delays of an op add "
        f"{of['share']:.0%} to a step, and twice that; stretches of {of['steps']} steps, "
        f"{of['rounds']} rounds."
    )
