"""Graphs as JSON, and the two hashes: of the structure, and of structure with shape."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput
from moegen.graph.model import ModelSpec
from moegen.graph.shape import Shape
from moegen.graph.strategy import Strategy
from moegen.graph.task import (
    Edge,
    EdgeKind,
    Lane,
    Layout,
    Reason,
    Ring,
    Task,
    TaskGraph,
    TaskId,
    Value,
    Work,
)

FORMAT = "moegen.graph/1"


def _structure(g: TaskGraph) -> dict[str, Any]:
    index = {t.id: i for i, t in enumerate(g.tasks)}
    return {
        "phase": g.phase,
        "n_steps": g.n_steps,
        "tasks": [
            {
                "id": list(t.id),
                "lane": t.lane.value,
                "reads": [list(v) for v in t.reads],
                "writes": [list(v) for v in t.writes],
            }
            for t in g.tasks
        ],
        "edges": [
            [index[e.src], index[e.dst], e.reason.kind.value, *e.reason[1:]] for e in g.edges
        ],
        "rings": [asdict(g.rings[name]) for name in sorted(g.rings)],
        "layout": None
        if g.layout is None
        else {"cpu_rows": g.layout.cpu_rows, "micro_batches": list(g.layout.micro_batches)},
    }


def _work(g: TaskGraph) -> list[dict[str, Any] | None]:
    return [None if t.work is None else dict(vars(t.work)) for t in g.tasks]


def _digest(data: Any) -> str:
    # Canonical: sorted keys, no spaces; floats by repr, which is exact.
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def structure_hash(g: TaskGraph) -> str:
    """SHA-256 over tasks, edges and rings in order; sizes do not enter."""
    structure = _structure(g)
    structure["rings"] = [
        {k: v for k, v in ring.items() if k != "slot_bytes"} for ring in structure["rings"]
    ]
    return _digest(structure)


def shape_hash(g: TaskGraph) -> str:
    """SHA-256 over the structure, the shape and every task's work."""
    shape = None if g.shape is None else g.shape.to_dict()
    return _digest([g.structure_hash, shape, _work(g)])


def to_dict(g: TaskGraph) -> dict[str, Any]:
    """Plain data that says everything about the graph."""
    return {
        "format": FORMAT,
        "structure": _structure(g),
        "work": _work(g),
        "shape": None if g.shape is None else g.shape.to_dict(),
        "model": None if g.model is None else g.model.to_dict(),
        "strategy": None if g.strategy is None else g.strategy.to_dict(),
    }


def from_dict(data: dict[str, Any]) -> TaskGraph:
    """Inverse of ``to_dict``.

    Raises
    ------
    InvalidInput
        If the data are not a graph of this format.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InvalidInput(f"not a task graph: expected format {FORMAT!r}, found {found!r}")
    try:
        s = data["structure"]
        tasks = tuple(
            Task(
                TaskId(*t["id"]),
                Lane(t["lane"]),
                tuple(Value(*v) for v in t["reads"]),
                tuple(Value(*v) for v in t["writes"]),
                None if w is None else Work(**w),
            )
            for t, w in zip(s["tasks"], data["work"], strict=True)
        )
        ids = [t.id for t in tasks]
        edges = tuple(
            Edge(ids[u], ids[v], Reason(EdgeKind(kind), *rest)) for u, v, kind, *rest in s["edges"]
        )
        layout = s["layout"]
        return TaskGraph(
            tasks,
            edges,
            {r["name"]: Ring(**r) for r in s["rings"]},
            phase=s["phase"],
            model=None if data["model"] is None else ModelSpec.from_dict(data["model"]),
            strategy=None if data["strategy"] is None else Strategy(**data["strategy"]),
            layout=None
            if layout is None
            else Layout(layout["cpu_rows"], tuple(layout["micro_batches"])),
            shape=None if data["shape"] is None else Shape.from_dict(data["shape"]),
            n_steps=s["n_steps"],
        )
    except (KeyError, TypeError, IndexError) as e:
        raise InvalidInput(f"the task graph is damaged: {type(e).__name__}: {e}") from e


def to_json(g: TaskGraph, path: str | Path) -> None:
    """Write ``g`` to ``path``."""
    Path(path).write_text(json.dumps(to_dict(g), allow_nan=False), encoding="utf-8")


def from_json(path: str | Path) -> TaskGraph:
    """Read a graph that ``to_json`` wrote.

    Raises
    ------
    InvalidInput
        If the file is missing or is not a graph.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise InvalidInput(f"cannot read the graph {path}: {e.strerror or e}") from e
    try:
        return from_dict(json.loads(text))
    except json.JSONDecodeError as e:
        raise InvalidInput(f"{path} is not JSON: line {e.lineno}: {e.msg}") from e
