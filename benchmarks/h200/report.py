"""Write REPORT.md beside this file from the raw results; a test checks that it is up to date.

python benchmarks/h200/report.py

A section is there as soon as its results are. Results that no section tells of are named at the
end.
"""

from __future__ import annotations

import json
from pathlib import Path

import sections_checks as checks
import sections_speed as speed
from markdown_pieces import Section
from targets import targets

HERE = Path(__file__).parent
RESULTS = HERE / "results"
REPORT = HERE / "REPORT.md"

# By the results that a section is there for, in the report's order; it gets them and all others.
SECTIONS: list[tuple[str, Section]] = [
    ("decode_bound", speed.decode),
    ("decode_bound_whole", speed.whole),
    ("peers", speed.peers),
    ("peers", speed.against_peers),
    ("cpu_attention", speed.cpu_attention),
    ("prefill", speed.prefill),
    ("small_batch", speed.small_batch),
    ("long_run", checks.long_run),
    ("sanitizer", checks.sanitizer),
    ("memory", checks.memory),
    ("decode_bound", checks.other_memory),
    ("bf16_error", checks.bf16),
    ("kernels", checks.kernels),
]


def report(folder: Path = RESULTS) -> str:
    """The report as Markdown, of the results in ``folder``."""
    found = {path.stem: path for path in sorted(folder.glob("*.json"))}
    lines = [
        "# Measured on an H200",
        "",
        "Written by `report.py` from `results/`; the scripts beside it make those. How far "
        "predictions of this machine hold: [prediction/REPORT.md](prediction/REPORT.md).",
        "",
    ]
    known = {name for name, _ in SECTIONS}
    data = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in found.items()
        if name in known
    }
    lines += targets(data)
    for name, section in SECTIONS:
        if name in data:
            lines += section(data[name], data)
    others = [name for name in found if name not in known and not name.startswith("timeline")]
    if others:
        lines += ["## Further raw results", "", *(f"- `results/{x}.json`" for x in others), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    REPORT.write_text(report(), encoding="utf-8")
