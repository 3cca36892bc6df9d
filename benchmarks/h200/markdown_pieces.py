"""Pieces of the report's Markdown: tables, sizes and rates for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Data = dict[str, Any]
Section = Callable[[Data, dict[str, Data]], list[str]]


def where(data: Data) -> list[str]:
    """On what, and when."""
    m = data["machine"]
    cpu = f", {m['cores']} cores of {m['cpu']}" if "cpu" in m else ""
    lanes = ", on CPU lanes" if m["gpu"] == "no GPU" else ""
    versions = f"torch {m['torch']}, Python {m['python']}"
    return [f"*{m['gpu']}{lanes}{cpu}, {versions}, {m['date']}.*", ""]


def left_out(data: Data) -> list[str]:
    """What a run did not come to, or could not do."""
    lines = [f"- not run, no time left: {x}" for x in data.get("left_out", ())]
    lines += [f"- failed: {x}" for x in data.get("failed", ())]
    if not lines and data.get("complete") is False:
        lines = ["- the run was stopped before its end"]
    return [*lines, ""] if lines else []


def table(columns: str, rows: list[list[str]]) -> list[str]:
    """A Markdown table; ``columns`` separated by ``|``."""
    names = [name.strip() for name in columns.split("|")]
    head = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows), ""]


def gib(nbytes: float) -> str:
    if 0 < nbytes < 2**30:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes else "0"


def gb(rate: float) -> str:
    return f"{rate / 1e9:.1f}"


def tera(rate: float) -> str:
    return f"{rate / 1e12:.0f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def pct(x: float) -> str:
    return f"{x:.1%}"


def signed(x: float) -> str:
    return f"{x:+.1%}".replace("-0.0%", "+0.0%")


def short(seconds: float) -> str:
    """Of a task."""
    return ms(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def folded(title: str, lines: list[str]) -> list[str]:
    """What a reader opens if he wants it."""
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "</details>", ""]
