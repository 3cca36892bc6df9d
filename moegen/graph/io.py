"""Graphs as JSON, and the two hashes: of the structure, and of structure with shape."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput, MoegenError
from moegen.graph.checks import number, whole, wholes
from moegen.graph.files import read_json, write_json
from moegen.graph.model import ModelSpec, Phase
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
                read_task_id(t["id"]),
                Lane(t["lane"]),
                tuple(_value(v) for v in t["reads"]),
                tuple(_value(v) for v in t["writes"]),
                None if w is None else _checked(Work(**w)),
            )
            for t, w in zip(s["tasks"], data["work"], strict=True)
        )
        ids = [t.id for t in tasks]
        edges = tuple(
            Edge(
                ids[whole(u, "the source of an edge")],
                ids[whole(v, "the end of an edge")],
                _reason(kind, *rest),
            )
            for u, v, kind, *rest in s["edges"]
        )
        layout = s["layout"]
        if layout is not None:
            layout = Layout(
                whole(layout["cpu_rows"], "cpu_rows"),
                wholes(layout["micro_batches"], "micro_batches", at_least=1),
            )
        return TaskGraph(
            tasks,
            edges,
            {r["name"]: _ring(Ring(**r)) for r in s["rings"]},
            phase=_phase(s["phase"]),
            model=None if data["model"] is None else ModelSpec.from_dict(data["model"]),
            strategy=None if data["strategy"] is None else Strategy(**data["strategy"]),
            layout=layout,
            shape=None if data["shape"] is None else Shape.from_dict(data["shape"]),
            n_steps=whole(s["n_steps"], "n_steps", at_least=1),
        )
    except MoegenError as e:
        raise InvalidInput(f"the task graph is damaged: {e}") from e
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as e:
        raise InvalidInput(f"the task graph is damaged: {type(e).__name__}: {e}") from e


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} must be text, got {value!r}")
    return value


def _phase(value: Any) -> Phase:
    if value not in ("prefill", "decode"):
        raise InvalidInput(f'a phase must be "decode" or "prefill", got {value!r}')
    return value


def read_task_id(fields: Any) -> TaskId:
    """The TaskId that ``list(task_id)`` was; InvalidInput if it is none."""
    op, phase, step, *places = fields
    whole(step, f"the step of {op}")
    return TaskId(
        _text(op, "an op"), _phase(phase), step, *(whole(p, f"{op}", at_least=-1) for p in places)
    )


def _value(fields: Any) -> Value:
    v = Value(*fields)
    _text(v.buffer, "a buffer")
    whole(v.index, f"the index of {v.buffer}")
    whole(v.distance, f"the distance of {v.buffer}")
    return v


def _reason(kind: Any, *rest: Any) -> Reason:
    r = Reason(EdgeKind(kind), *rest)
    whole(r.distance, "the distance of an edge")
    _text(r.buffer, "the buffer of an edge")
    if not isinstance(r.host, bool):
        raise InvalidInput(f"host of an edge must be true or false, got {r.host!r}")
    return r


def _ring(r: Ring) -> Ring:
    _text(r.name, "the name of a ring")
    _text(r.where, f"the place of {r.name}")
    for field in ("slots", "uses", "slot_bytes"):
        whole(getattr(r, field), f"{field} of {r.name}")
    return r


def _checked(work: Work) -> Work:
    """Refuse work that is none; its numbers stay of their types, which the hash depends on."""
    for name, value in vars(work).items():
        if name in ("rows", "launches"):
            whole(value, name)
        else:
            number(value, name, at_least=0)
    return work


def to_json(g: TaskGraph, path: str | Path) -> None:
    """Write ``g`` to ``path``; InvalidInput if that cannot be written."""
    write_json(path, to_dict(g), "the task graph")


def from_json(path: str | Path) -> TaskGraph:
    """Read a graph that ``to_json`` wrote.

    Raises
    ------
    InvalidInput
        If the file is missing, or is not a graph, or a damaged one.
    """
    return from_dict(read_json(path, "the task graph"))
