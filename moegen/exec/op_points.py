"""Which sizes of which ops a profile measures, as graphs of a few layers of a model."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moegen.graph.build import build
from moegen.graph.model import ModelSpec
from moegen.graph.sound_waves import PART_TOKENS, expert_group
from moegen.graph.strategy import Strategy
from moegen.graph.task import TaskGraph

# Layers whose dense weights no cache holds, and, as far as all of their weights are no more than so
# many bytes, three: in a step's first layer the issuing thread finds more of its code in the caches
# than in others, and kernels that end the last one end sooner.
_DENSE_BYTES, _LAYERS, MOST_BYTES = 128 << 20, 3, 10 << 30
# On CPU lanes all of them are computed by a few cores, and no cache holds their experts either.
MOST_CPU_BYTES = 1 << 30
# What an op's time depends on: tokens of matrix products, rows and context of attention; what is
# far apart first, so that little time gives a wide grid.
_DECODE_ROWS = (64, 1024, 1, 4096, 256, 512, 16, 128, 2048)
# Rows at which ops are timed beside KV being fetched, too: two sizes tell what a task waits for
# then, short or long; and the ops that are beside it in a run: what a layer's attention is
# followed by.
_CROWDED_ROWS = frozenset({64, 1024})
CROWDED_OPS = frozenset({
    "pre_attn", "post_attn", "route", "copy_counts", "shared_expert", "dense_mlp", "expert",
})  # fmt: skip
_SINGLE_ROWS = (1, 64, 1024)
# Tokens behind each row, and with a GPU of all rows: so many that the CPU's attention drives the
# launching thread's code out of the caches, as in a run, and that their store is soon made up.
_LEAST_CONTEXT, _MOST_CONTEXT = 16, 4096
_ATTENDED_TOKENS, _KV_BYTES = 1 << 18, 3 << 30
# Of attention: rows on the CPU, context, and micro-batches of as many rows on the GPU (the first
# of a layer takes longer to hand over); again what is far apart first. A GPU splits rows of more
# than a block of tokens, which takes another kernel and adds up the parts: so there is one context
# just beyond.
_ATTENTION = (
    (8, 64, 3), (128, 64, 3), (8, 1536, 3), (128, 1536, 3), (512, 512, 0), (128, 512, 3),
    (8, 512, 3), (512, 64, 0), (512, 1536, 0), (2048, 64, 0), (8, 192, 3), (128, 192, 3),
    (32, 64, 3), (32, 192, 3), (32, 512, 3), (32, 1536, 3), (1, 64, 3), (1, 1536, 3),
)  # fmt: skip
# Tokens of a product that tell what launching a further one takes.
_SMALL_PRODUCT, _MOST_SLOTS = 128, 8
# Tokens of a wave, of a product, and of each prompt: first what keeps a GPU busy all the time, for
# it computes slower then, in one product and in several, with more rows and with fewer; then what
# leaves it time to cool, in few products.
_LARGE_WAVE = 65536
_WAVES = (
    (_LARGE_WAVE, _LARGE_WAVE, 64), (_LARGE_WAVE, 8192, 256), (_LARGE_WAVE, 2048, 512),
    (16384, 2048, 256), (4096, 4096, 64), (1024, 1024, 64), (256, 256, 64), (64, 64, 64),
)  # fmt: skip
# Prompts of a micro-batch by length, and tokens of all of them. A kernel works in tiles of some 128
# tokens, and a prompt of 16 takes it more than half as long: so short lengths lie close.
_ATTENDED = (
    (128, 16384), (2048, 16384), (16, 16384), (512, 16384), (64, 16384), (256, 16384),
    (2048, 2048), (128, 2048), (512, 2048), (16, 2048), (64, 2048), (256, 2048),
    (8192, 16384), (128, 512), (512, 512),
)  # fmt: skip

PRODUCTS = ("pre_attn", "post_attn", "route", "shared_expert", "dense_mlp", "expert", "combine")
# Grids whose steps are as those of a run: they tell what the issuing thread takes for all ops, and
# most ops are of theirs, so they get so many times the time of others.
_WHOLE_STEPS, _MORE_TIME = frozenset({"decode", "prefill"}), 1.5
# Steps of a point; in decode more, for what the thread takes rises over the first few.
_STEPS, _DECODE_STEPS = 4, 6

DECODE_OPS = (
    "copy_rows", "embed", *PRODUCTS, "recv_attn", "append_kv", "copy_counts", "lm_head", "sample",
    "copy_tokens",
)  # fmt: skip
# Beside a GPU they take long, and are as long whatever the rows: those of so many rows tell.
_WEIGHTS, _WEIGHTS_ROWS = ("copy_dense", "copy_expert"), frozenset({64, 1024})
# While a few micro-batches are fetched and attended to, rows are sent beside all that a run has.
ATTENTION_OPS = ("fetch_kv", "attn_gpu", "attn_cpu", "send_qkv")
PREFILL_OPS = ("copy_rows", "embed", "pre_attn", "append_kv", "post_attn", "route", "copy_counts",
               "shared_expert", "dense_mlp", "expert", "combine", "lm_head", "sample")  # fmt: skip


class Point(NamedTuple):
    """A graph, and the ops of it to time.

    ``grid`` names the points that belong together: once one of them has taken too long, those
    that are as large are left out. So many ``steps`` of it are run; in a ``crowd`` ops are timed
    beside KV being fetched, too.
    """

    graph: TaskGraph
    ops: tuple[str, ...]
    grid: str
    steps: int = _STEPS
    crowd: bool = False

    @property
    def tells(self) -> frozenset[str]:
        """Ops of which it tells what handing them over takes."""
        whole = self.grid in _WHOLE_STEPS
        return frozenset(t.id.op for t in self.graph if whole or t.id.op in self.ops)

    @property
    def size(self) -> int:
        """Tokens of all rows."""
        shape = self.graph.shape
        return sum(shape.past) + shape.tokens if shape is not None else 0

    @property
    def timed(self) -> set[tuple[str, str]]:
        """Op and phase of what it would time."""
        phase = self.graph.phase or ""
        return {(t.id.op, phase) for t in self.graph if t.id.op in self.ops}


class Agenda:
    """The points to measure, as far as there is time.

    Grids share the time, those of whole steps with half as much again as others: next comes the
    point after which its grid will have taken the least of its share, in the grid's order, so that
    time that runs out is missed by all of them alike. A point takes some time whatever its size,
    and more for each token: to make its rows and to run the whole graph. An op that no point has
    timed yet is worth its time in any case.

    Parameters
    ----------
    points : iterable of Point
    until_s : float
        On the clock of ``time.perf_counter``.

    Attributes
    ----------
    late : list of Point
        What there was no time for.
    """

    def __init__(self, points: Iterable[Point], until_s: float) -> None:
        self._until_s = until_s
        self._grids: dict[str, deque[Point]] = defaultdict(deque)
        for point in points:
            self._grids[point.grid].append(point)
        self._spent_s = dict.fromkeys(self._grids, 0.0)
        self._timed: set[tuple[str, str]] = set()
        self._took: dict[str, list[tuple[int, float]]] = defaultdict(list)  # by phase
        self.late: list[Point] = []

    def __iter__(self) -> Iterator[Point]:
        """Each point when it is its turn; who asks for the next has measured it."""
        while left := [points for points in self._grids.values() if points]:
            point = min(left, key=lambda points: self._after_s(points[0])).popleft()
            began_s = time.perf_counter()
            if point.timed <= self._timed and began_s + self._expected_s(point) > self._until_s:
                self.late.append(point)
                continue
            self._timed |= point.timed
            yield point
            taken_s = time.perf_counter() - began_s
            self._spent_s[point.grid] += taken_s
            self._took[point.graph.phase or ""].append((point.size, taken_s))

    def too_large(self, point: Point) -> None:
        """Leave out what is as large, of the same grid."""
        points = self._grids[point.grid]
        self._grids[point.grid] = deque(p for p in points if p.size < point.size)

    def _after_s(self, point: Point) -> float:
        """What its grid will have taken once it has been measured, for its share of the time."""
        share = _MORE_TIME if point.grid in _WHOLE_STEPS else 1.0
        return (self._spent_s[point.grid] + self._expected_s(point)) / share

    def _expected_s(self, point: Point) -> float:
        took = self._took[point.graph.phase or ""]
        if not took:
            return 0.0
        least_s = min(seconds for _, seconds in took)
        size, seconds = max(took)
        return least_s + (seconds - least_s) * point.size / size


def profiled_layers(model: ModelSpec, most_bytes: int = MOST_BYTES) -> ModelSpec:
    """The first layers of a model: one of each class, and as many as three, or as caches do not
    hold, if their weights are not too large.

    Parameters
    ----------
    model : ModelSpec
    most_bytes : int
        Of their weights, beyond one of each class.
    """
    classes = {layer.name for layer in model.layers}
    n = next(
        n for n in range(1, model.n_layers + 1) if {x.name for x in model.layers[:n]} == classes
    )
    dense = [layer.dense_bytes for layer in model.layers]
    whole = [layer.weight_bytes for layer in model.layers]
    while n < model.n_layers and sum(whole[: n + 1]) <= most_bytes:
        if n >= _LAYERS and sum(dense[:n]) >= _DENSE_BYTES:
            break
        n += 1
    return model.with_(n_layers=n)


def strategy(
    model: ModelSpec, rows: int, part: int, omega: float, group: int, product: int = 65536
) -> Strategy:
    """Nothing stays on the GPU, and there are so many slots for experts that copies are ahead, and
    so few that launching them never waits for room in the driver's queue."""
    n = min(_MOST_SLOTS * group, max(layer.n_experts for layer in model.layers))
    return Strategy(
        B=rows,
        b_a=part,
        b_e=product,
        s_expert=n * model.expert_bytes,
        omega=omega,
        expert_group=group,
    )


def decode_points(model: ModelSpec, *, on_gpu: bool) -> Iterator[Point]:
    """What to measure of decode steps, grid by grid.

    Parameters
    ----------
    model : ModelSpec
        Of few layers.
    on_gpu : bool
        Whether steps are as those of a run are, and what tells most comes first. On CPU lanes
        rows have as little KV as can be, and what is small, which may be all there is time for,
        comes first.
    """
    found = _of_decode(model, on_gpu)
    return found if on_gpu else iter(sorted(found, key=lambda point: point.size))


def prefill_points(model: ModelSpec, *, on_gpu: bool) -> Iterator[Point]:
    """What to measure of waves of prompts, grid by grid; otherwise as :func:`decode_points`."""
    found = _of_prefill(model)
    return found if on_gpu else iter(sorted(found, key=lambda point: point.size))


def _of_decode(model: ModelSpec, on_gpu: bool) -> Iterator[Point]:
    group = expert_group(model)
    for rows in _DECODE_ROWS:
        s = strategy(model, rows, rows, 0.5 if rows > 1 else 0.0, group)
        most = min(_MOST_CONTEXT, model.max_context - 1)
        held = min(_ATTENDED_TOKENS, _KV_BYTES // model.kv_bytes_per_token) // rows
        context = max(1, min(held, most)) if on_gpu else _LEAST_CONTEXT
        g = build(model, s, kv_len=context)
        steps, crowd = (_DECODE_STEPS, rows in _CROWDED_ROWS) if on_gpu else (_STEPS, False)
        weights = _WEIGHTS if rows in _WEIGHTS_ROWS or not on_gpu else ()
        ops = (*DECODE_OPS, *weights)
        yield Point(g, ops, "decode", steps, crowd)
    if group > 1:  # one by one too
        for rows in _SINGLE_ROWS:
            s = strategy(model, rows, rows, 0.5, 1)
            g = build(model, s, kv_len=_LEAST_CONTEXT)
            yield Point(g, ("copy_expert", "expert"), "decode, single experts")
    if on_gpu:
        s = strategy(model, 1024, 1024, 0.5, group, _SMALL_PRODUCT)
        g = build(model, s, kv_len=_LEAST_CONTEXT)
        yield Point(g, ("route", "expert"), "decode, small products")
    for rows, context, parts in _ATTENTION:
        s = strategy(model, (parts + 1) * rows, rows, 1 / (parts + 1), group)
        g = build(model, s, kv_len=context - 1)
        yield Point(g, ATTENTION_OPS, "attention")


def _of_prefill(model: ModelSpec) -> Iterator[Point]:
    group = expert_group(model)
    for tokens, product, prompt in _WAVES:
        prompt = min(prompt, model.max_context)
        rows, part = tokens // prompt, max(1, min(tokens, PART_TOKENS) // prompt)
        s = strategy(model, rows, part, 0.0, group, product)
        yield Point(build(model, s, "prefill", prompt_len=prompt), PREFILL_OPS, "prefill")
    for prompt, tokens in _ATTENDED:
        if prompt <= model.max_context:
            s = strategy(model, tokens // prompt, tokens // prompt, 0.0, group)
            g = build(model, s, "prefill", prompt_len=prompt)
            yield Point(g, ("attn_prefill",), "prompts")
