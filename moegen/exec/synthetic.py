"""Running a graph on made-up rows of its own shape, to measure what was simulated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from moegen.errors import InvalidInput
from moegen.exec.issue import Delays
from moegen.exec.kv import KVStore
from moegen.exec.program import Machinery, Program
from moegen.exec.record import Recorder
from moegen.exec.runner import Runner
from moegen.exec.step import Row, Step
from moegen.graph.checks import whole
from moegen.graph.detect import cores
from moegen.graph.model import ModelSpec
from moegen.graph.sizes import Capacity
from moegen.graph.task import TaskGraph

if TYPE_CHECKING:
    from moegen.timeline import Timeline

_PATTERN_TOKENS = 1021  # prime, so that no row repeats another


def run_synthetic(
    g: TaskGraph, machinery: Machinery, steps: int, delays: Delays | None = None
) -> Timeline:
    """Run ``steps`` steps of ``g``, each of exactly the graph's shape, KV filled.

    Raises
    ------
    InvalidInput
        If the graph has no shape or no live row, is of another model or dtype, or is unrolled
        already, or ``steps`` is no whole number of at least 1.
    """
    if not isinstance(g, TaskGraph):
        raise InvalidInput(f"execute takes a TaskGraph, got {g!r}")
    if g.n_steps != 1:
        raise InvalidInput(
            f"the graph is unrolled to {g.n_steps} steps: execute the graph of one step, "
            f"with steps={g.n_steps}"
        )
    if g.shape is None or g.layout is None:
        raise InvalidInput("the graph has no shape: build it, or bind one")
    model = machinery.family.spec
    _require_same(g.model, model)
    steps = whole(steps, "steps", at_least=1)
    if g.shape.tokens == 0:
        raise InvalidInput("every row of the graph's shape has ended: there is nothing to run")
    shape, layout = g.shape, g.layout
    lengths = [p + n for p, n in zip(shape.past, shape.new, strict=True)]
    pin = machinery.device.type == "cuda"
    store = KVStore(model, sum(lengths), machinery.family.dtype, pin=pin)
    _fill(store)
    rows = [
        Row(start, past, [(start + 7 * i) % model.vocab for i in range(new)]) if new else None
        for start, past, new in zip(store.allocate(lengths), shape.past, shape.new, strict=True)
    ]
    recorder = Recorder(g, steps, machinery.device.type)

    def source(_: Program, index: int) -> Step | None:
        if index >= steps:
            return None
        step = Step(layout, rows)
        recorder.bound(index, step)
        return step

    try:
        program = Program(g, machinery, store, _capacity(g), source)
        Runner(
            g,
            program,
            machinery.device,
            delays=delays,
            on_records=recorder.add,
            on_delays=recorder.delayed,
        ).run()
    finally:
        store.close()
    timeline = recorder.timeline()
    weights = machinery.weights
    notes = [*weights.notes, *([store.note] if store.note else [])]
    timeline.meta.update(pinned=weights.pinned and store.pinned, notes=notes)
    return timeline


def _require_same(graphs: ModelSpec | None, engines: ModelSpec) -> None:
    """Refuse a graph whose work would not be what the engine does."""
    if graphs is None:
        raise InvalidInput("the graph is of no model: build it of the engine's")
    differs = [
        f"{what} is {getattr(graphs, what)} in the graph and {getattr(engines, what)} in the engine"
        for what in ("dtype", "hidden", "vocab", "n_layers")
        if getattr(graphs, what) != getattr(engines, what)
    ] or [
        f"layer {i} has other sizes"
        for i, (a, b) in enumerate(zip(graphs.layers, engines.layers, strict=True))
        if a != b
    ]
    if differs:
        raise InvalidInput(
            f"the graph is of {graphs.name} and the engine holds {engines.name}: {differs[0]}; "
            "build the graph of engine.model"
        )


def _fill(store: KVStore) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = [
        torch.randn(_PATTERN_TOKENS, x.shape[1], generator=generator).to(x.dtype)
        for x in store.layers
    ]

    def fill(layer: torch.Tensor, pattern: torch.Tensor) -> None:
        for at in range(0, len(layer), _PATTERN_TOKENS):
            layer[at : at + _PATTERN_TOKENS] = pattern[: len(layer) - at]

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(fill, store.layers, patterns))


def _capacity(g: TaskGraph) -> Capacity:
    """What the graph's own shape asks for."""
    assert g.shape is not None and g.layout is not None
    shape, layout = g.shape, g.layout
    return Capacity.of(g.phase, layout, shape.new, [n + 1 for n in shape.past])
