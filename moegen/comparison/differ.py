"""In what two graphs differ, in words: which model, phase, strategy or batch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from moegen.graph.model import ModelSpec
from moegen.graph.task import TaskGraph


def differences(predicted: TaskGraph, measured: TaskGraph) -> str:
    """What is one thing in the first graph and another in the second; tasks if nothing else is."""
    facts = [_facts(g) for g in (predicted, measured)]
    names = dict.fromkeys(name for of in facts for name in of)
    found = [
        f"{name} {_shown(facts[0].get(name))} predicted and {_shown(facts[1].get(name))} measured"
        for name in names
        if facts[0].get(name) != facts[1].get(name)
    ]
    return "; ".join(found or [_tasks(predicted, measured)])


def _facts(g: TaskGraph) -> dict[str, Any]:
    facts: dict[str, Any] = {"the model is": "hand-made" if g.model is None else g.model.name}
    facts["the phase is"] = g.phase
    if g.model is not None:
        facts |= _of_model(g.model)
    if g.strategy is not None:
        facts |= {f.name: getattr(g.strategy, f.name) for f in dataclasses.fields(g.strategy)}
    if g.layout is not None:
        facts["rows on the CPU:"] = g.layout.cpu_rows
        facts["micro-batches on the GPU:"] = list(g.layout.micro_batches)
    facts["steps unrolled:"] = g.n_steps
    return facts


def _of_model(model: ModelSpec) -> dict[str, Any]:
    of = {"layers:": model.n_layers, "layers of experts:": model.n_moe_layers}
    return of | {"experts of a layer:": max((x.n_experts for x in model.layers), default=0)}


def _shown(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _tasks(predicted: TaskGraph, measured: TaskGraph) -> str:
    before, after = (Counter(t.id.op for t in g) for g in (predicted, measured))
    ops = [
        f"{before[op]} tasks of {op} predicted and {after[op]} measured"
        for op in dict.fromkeys([*before, *after])
        if before[op] != after[op]
    ]
    return "; ".join(ops) or "the same tasks wait for each other in another way"
