"""Running a graph on made-up rows of its own shape, to measure what was simulated."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import torch

from moegen.errors import InvalidInput
from moegen.exec.delays import Delays
from moegen.exec.kv import KVStore
from moegen.exec.program import Machinery, Program
from moegen.exec.record import Recorder
from moegen.exec.runner import Runner
from moegen.exec.step import Row, Step
from moegen.graph.checks import whole
from moegen.graph.detect import cores
from moegen.graph.model import ModelSpec
from moegen.graph.sizes import Capacity
from moegen.graph.task import Task, TaskGraph

if TYPE_CHECKING:
    from moegen.timeline import Timeline

_WARM_UP = 1  # steps
_PATTERN_TOKENS = 1021  # prime, so that no row repeats another


def run_synthetic(
    g: TaskGraph, machinery: Machinery, steps: int, delays: Delays | None = None
) -> Timeline:
    """Run ``steps`` steps of ``g``, each of exactly the graph's shape, KV filled.

    One more comes before them and is not in the timeline: it compiles kernels, and meanwhile all
    slots fill with what is copied ahead, so that the step behind it is too short. Delays are
    counted from the first step that is.

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
    recorder = Recorder(g, steps, machinery.device)
    with MadeUpKV(machinery) as kv:
        made = MadeUp(g, machinery, kv)

        def source(_: Program, index: int) -> Step | None:
            if index >= _WARM_UP + steps:
                return None
            step = made.step()
            recorder.bound(index, step)
            return step

        program = made.program(source)
        Runner(
            g,
            program,
            machinery.device,
            delays=None if delays is None else _Later(delays),
            on_records=recorder.add,
            on_delays=recorder.delayed,
        ).run()
    timeline = recorder.timeline()
    weights, store = machinery.weights, made.store
    notes = [*weights.notes, *([store.note] if store.note else [])]
    timeline.meta.update(pinned=weights.pinned and made.pinned, notes=notes)
    return timeline


class _Later:
    """Delays that begin after the warm-up."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays

    def issue_s(self, task: Task, index: int) -> float:
        return self._delays.issue_s(task, index - _WARM_UP) if index >= _WARM_UP else 0.0

    def run_s(self, task: Task, index: int) -> float:
        return self._delays.run_s(task, index - _WARM_UP) if index >= _WARM_UP else 0.0


class MadeUpKV:
    """Host memory full of made-up KV, for the rows of one graph after another.

    Use it as a context: at the end the memory is given back. Filling and registering it takes
    longer than many a step, so it is made anew only where rows need more than there is.

    Parameters
    ----------
    machinery : Machinery
    """

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery
        self._store: KVStore | None = None

    def store(self, tokens: int) -> KVStore:
        """One that holds so many tokens at least."""
        if self._store is None or self._store.tokens < tokens:
            self.close()
            family = self._machinery.family
            pin = self._machinery.device.type == "cuda"
            self._store = KVStore(family.spec, tokens, family.dtype, pin=pin)
            _fill(self._store)
        return self._store

    @property
    def nbytes(self) -> int:
        """Bytes of what there is now."""
        return 0 if self._store is None else self._store.nbytes

    def close(self) -> None:
        """Give the memory back."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MadeUp:
    """Made-up rows of a graph's own shape, their KV filled.

    Parameters
    ----------
    g : TaskGraph
        Of one step, with a shape that has a live row.
    machinery : Machinery
    kv : MadeUpKV
        Of ``machinery``; holds the rows' KV, and must not be closed before they are done with.
    sets : int
        So many sets of the same rows, each with KV of its own.

    Attributes
    ----------
    store : KVStore
    pinned : bool
        Whether kernels read and write the store in place.

    Raises
    ------
    InvalidInput
        If every row has ended.
    """

    def __init__(self, g: TaskGraph, machinery: Machinery, kv: MadeUpKV, sets: int = 1) -> None:
        assert g.shape is not None and g.layout is not None
        if g.shape.tokens == 0:
            raise InvalidInput("every row of the graph's shape has ended: there is nothing to run")
        self.graph, self.machinery, self._layout = g, machinery, g.layout
        model, shape = machinery.family.spec, g.shape
        lengths = [p + n for p, n in zip(shape.past, shape.new, strict=True)]
        self.store = kv.store(sets * sum(lengths))
        self.pinned = self.store.pinned
        starts = self.store.allocate(lengths * sets)
        self._sets = [
            [
                Row(start, past, [(start + 7 * i) % model.vocab for i in range(new)])
                if new
                else None
                for start, past, new in zip(
                    starts[k * shape.rows :][: shape.rows], shape.past, shape.new, strict=True
                )
            ]
            for k in range(sets)
        ]

    @property
    def n_sets(self) -> int:
        """Sets of rows."""
        return len(self._sets)

    def step(self, of: int = 0) -> Step:
        """A step of one of the sets of rows."""
        return Step(self._layout, self._sets[of])

    def steps(self) -> list[Step]:
        """A step of each set of rows."""
        return [self.step(k) for k in range(len(self._sets))]

    def program(self, source: Callable[[Program, int], Step | None]) -> Program:
        """The graph, bound to buffers of just the size that the rows need."""
        return Program(self.graph, self.machinery, self.store, _capacity(self.graph), source)


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
