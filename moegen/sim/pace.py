"""How long a layer takes among others like it, for hundreds of strategies at once.

The engine runs one graph. Here the same lanes, slots and fair sharing run for many strategies in
step: each column of the arrays is a strategy with a clock of its own, and every turn of the loop
takes each of them to its next event. Layers are stamped from one, as the builder does it. What the
issuing thread takes of each task (`moegen.sim.issuing`) is not in it: where that binds, as in steps
of a few rows whose weights stay on the GPU, steps take longer than this says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from moegen.errors import DeadlockError
from moegen.graph.company import RESOURCES
from moegen.graph.model import Phase
from moegen.sim.cost import CostModel
from moegen.sim.pieces import AT, KINDS, LANES, Pieces
from moegen.sim.rough import bounds_s, company_s
from moegen.sim.sharing import ROUNDING, fair_speeds_of_many

# More groups of experts, or micro-batches, than this are taken several at a time, as so many.
MOST_GROUPS, AS_GROUPS = 16, 16
MOST_PARTS, AS_PARTS = 24, 12
GPU, BULK, KV, ACT, CPU = range(5)


class _Layer(NamedTuple):
    """Structure of a layer: what decides which tasks wait for which."""

    phase: Phase
    parts: int
    groups: int
    resident: int
    slots: int
    kv_slots: int
    dense_slots: int
    on_cpu: bool
    copies_dense: bool
    routed: bool


# What must have ended before a task: (lane, layers later, place in layer). A task's kind, and that.
_Need = tuple[int, int, int]
_Task = tuple[str, list[_Need]]


@lru_cache(maxsize=4096)
def _tasks(x: _Layer) -> tuple[Sequence[_Task], ...]:
    """The tasks of a layer, lane by lane in their order, as `moegen.graph.build` emits them."""
    M, G, R = x.parts, x.groups, x.resident
    decode = x.phase == "decode"
    shared_at = (M + 3) if decode else 3 * M + 1  # places on the GPU
    expert_at = shared_at + 1 + R
    dense_of = -1 if x.routed else 0  # the layer whose turn copies this layer's dense weights
    dense: list[_Need] = [(BULK, dense_of, 0)] if x.copies_dense else []
    counts: _Need = (ACT, 0, 2 if x.on_cpu else 0)
    copy_at = 1 if x.copies_dense else 0

    gpu: list[_Task] = []
    kv: list[_Task] = []
    if decode:
        gpu.append(("pre_attn", [*dense, *([(KV, -2, M)] if M else [])]))
        for m in range(M):
            last = m == M - 1
            gpu.append(("last_attention" if last else "attention", [(KV, 0, m)]))
            later, before = divmod(m - x.kv_slots, M)
            kv.append(("last_fetch" if last else "fetch_kv", [(GPU, later, 1 + before)]))
        if M:
            kv.append(("append_kv", [(GPU, 0, 0)]))
        gpu.append(("post_attn", [(ACT, 0, 1)] if x.on_cpu else []))
    else:
        for m in range(M):
            later, before = divmod(m - 2, M)  # queries, keys and values have two slots
            gpu.append(("pre_attn", [*dense, (KV, later, before)]))
            gpu.append(("attention", []))
            gpu.append(("post_attn", []))
            kv.append(("append_kv", [(GPU, 0, 3 * m)]))
    gpu += [("route", []), ("shared", [])]
    gpu.extend(("resident", [counts]) for _ in range(R))
    for j in range(G):
        gpu.append(("expert", [counts, (BULK, 0, copy_at + j)]))
    gpu.append(("combine", []))

    bulk: list[_Task] = []
    if x.copies_dense:
        later = -x.dense_slots - dense_of
        bulk.append(("copy_dense", [(GPU, later, shared_at)]))
    for j in range(G):
        later, before = divmod(j - x.slots, G)
        needs = [(GPU, later, expert_at + before)]
        bulk.append(("copy_expert", [*needs, counts] if x.routed else needs))

    act: list[_Task] = []
    cpu: list[_Task] = []
    if x.on_cpu:
        act += [("send_qkv", [(GPU, 0, 0)]), ("recv_attn", [(CPU, 0, 0)])]
        cpu.append(("attn_cpu", [(ACT, 0, 0)]))
    act.append(("copy_counts", [(GPU, 0, shared_at - 1)]))
    return gpu, bulk, kv, act, cpu


def coarse(p: Pieces) -> Pieces:
    """The same with many small groups, and micro-batches, taken several at a time."""
    of_group = _fewer(p.groups, MOST_GROUPS, AS_GROUPS)
    of_part = _fewer(p.parts, MOST_PARTS, AS_PARTS)
    seconds = p.seconds.copy()

    def times(factor: np.ndarray, *kinds: str) -> None:
        for kind in kinds:
            seconds[:, AT[kind]] *= factor

    def scaled(n: np.ndarray, by: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fewer of them, and how much longer each is."""
        few = np.ceil(n / by).astype(np.int64)
        return few, n / np.maximum(1, few)

    few_groups, longer = scaled(p.groups, of_group)
    times(longer, "copy_expert", "expert")
    # Nothing comes between those that stay.
    times(np.maximum(1, p.resident), "resident")
    resident = np.minimum(p.resident, 1)
    few_parts, _ = scaled(p.parts, of_part)
    for kind, last in (("attention", "last_attention"), ("fetch_kv", "last_fetch")):
        k, other = AT[kind], AT[last]
        # Micro-batches taken together are alike: the last one among them is no shorter.
        mean_s = ((p.parts - 1) * seconds[:, k] + seconds[:, other]) / np.maximum(1, few_parts)
        for i in (k, other):
            seconds[:, i] = np.where(of_part > 1, mean_s, seconds[:, i])
    # One slot makes copies and products take turns; with two they go side by side.
    slots = np.maximum(np.minimum(p.slots, 2), p.slots // of_group)
    # Attention is so much shorter than its KV takes to come that turns cost little.
    kv_slots = np.maximum(1, p.kv_slots // of_part)
    return replace(
        p, seconds=seconds, groups=few_groups, resident=resident, parts=few_parts, slots=slots,
        kv_slots=kv_slots,
    )  # fmt: skip


def _fewer(n: np.ndarray, most: int, target: int) -> np.ndarray:
    """How many of ``n`` are taken together."""
    return np.where(n > most, -(-n // target), 1)


def periods_s(p: Pieces, cost: CostModel, phase: Phase, shared: bool = True) -> np.ndarray:
    """Seconds of one of many repeated steps; shape [strategies].

    Parameters
    ----------
    p : Pieces
        Of many strategies.
    shared : bool
        Whether tasks that run at the same time share resources; see ``simulate``.
    """
    # Slots for many layers fill for longer than layers are run: what binds in the end is asked too.
    bounds = [
        part_s
        for name, part_s in bounds_s(p, cost, phase).items()
        if shared or name.startswith("lane")
    ]
    if shared:
        bounds += company_s(p, cost, phase)
    bound = np.maximum.reduce(bounds)
    p = coarse(p)
    period_s = np.empty(len(p))
    tasks = 2 * p.groups + p.parts * (2 if phase == "decode" else 4)
    # Those with about as many tasks go together: the loop turns as often as the longest needs.
    many = tasks > 3 * tasks.min(initial=10**6) + 16
    for some in (np.flatnonzero(~many), np.flatnonzero(many)):
        if len(some):
            layer_s, between_s = _Batch(p, some, cost, phase, shared).run()
            period_s[some] = p.repeats * layer_s + between_s
    return np.maximum(bound, period_s)


class _Run(NamedTuple):
    """Layers that are run: some of one step, and some of the next.

    The pace is that of the last layers of the first step, which have some before them; and what
    lies between the steps is what the first layers of the second take longer than that.
    """

    period: int  # layers of the pattern

    @property
    def before(self) -> int:
        """Layers of the first step."""
        return max(3, 3 * self.period)

    @property
    def paced(self) -> int:
        """Layers whose pace counts."""
        return max(2, self.period)

    @property
    def layers(self) -> int:
        """Layers in all; the last ones only give those before them something beside them."""
        return self.before + self.paced + self.period


class _Batch:
    """Strategies that run in step; see the module."""

    def __init__(
        self, p: Pieces, some: np.ndarray, cost: CostModel, phase: Phase, shared: bool
    ) -> None:
        self.of = of = _Run(len(p.seconds))
        columns = (p.parts, p.groups, p.resident, p.slots, p.kv_slots, p.dense_slots, p.on_cpu,
                   p.copies_dense, p.routed)  # fmt: skip
        stamps = [
            _Layer(phase, *row) for row in zip(*(c[some].tolist() for c in columns), strict=True)
        ]
        distinct = {stamp: i for i, stamp in enumerate(dict.fromkeys(stamps))}
        which = np.array([distinct[stamp] for stamp in stamps])
        tables = [_stamped(stamp, of) for stamp in distinct]
        longest = max(kind.shape[1] for kind, _, _ in tables)
        n = len(distinct)
        kind = np.zeros((n, 5, longest + 1), dtype=np.int64)
        need = np.full((n, 5, longest + 1, 5), np.iinfo(np.int32).max, dtype=np.int32)
        ends = np.zeros((n, of.layers), dtype=np.int64)
        for i, (kinds, needs, gpu_ends) in enumerate(tables):
            kind[i, :, : kinds.shape[1]] = kinds
            need[i, :, : kinds.shape[1]] = needs
            ends[i] = gpu_ends
        self.kind, self.need, self.ends = kind, need, ends[which]
        self.which, self.stamps = which, list(distinct)
        # What only one lane draws on is never short, unless it gives less beside another's.
        drawn: np.ndarray = np.any(p.draws, axis=0)
        lanes = [drawn[[AT[kind] for kind in kinds], :].any(axis=0) for kinds in LANES.values()]
        of_lanes = np.sum(lanes, axis=0)
        named = {name for entry in cost.company for name in (entry.resource, entry.beside)}
        least = np.array([0 if name in named else 1 for name in RESOURCES])
        used = np.flatnonzero(of_lanes > least) if shared else np.zeros(0, dtype=int)
        # By strategy, then by kind of the first layer of the pattern, the second, ...
        self.seconds = np.moveaxis(p.seconds[:, :, some], 2, 0).reshape(len(some), -1)
        loads = np.moveaxis(p.loads[:, :, used][..., some], 3, 0)
        self.loads = loads.reshape(len(some), self.seconds.shape[1], len(used))
        self.cost, self.names = cost, [RESOURCES[r] for r in used.tolist()]

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a layer, and how much longer it takes from one step to the next."""
        n, of = len(self.ends), self.of
        marks = (of.before - 1 - of.paced, of.before - 1, of.before - 1 + of.paced)
        until = self.ends[:, marks[-1]]
        at_s = np.zeros((n, 3))
        live = np.arange(n)
        now = np.zeros(n)
        done = np.zeros((n, 5), dtype=np.int64)  # tasks of each lane that have ended
        running = np.zeros((n, 5), dtype=bool)
        left = np.zeros((n, 5))
        draws = np.zeros((n, 5, self.loads.shape[2]))
        lanes = np.arange(5)[None, :]
        which, longest = self.which, self.kind.shape[2]
        kind = self.kind.reshape(-1)
        need = self.need.reshape(-1, 5)
        base = (which[:, None] * 5 + lanes) * longest
        seconds, loads, ends = self.seconds, self.loads, self.ends
        cost, names = self.cost, self.names
        while len(live):
            task = base + done
            ready = ~running & (need[task] <= done[:, None, :]).all(axis=2)
            row, lane = np.nonzero(ready)
            if len(row):
                here = kind[task[row, lane]]
                left[row, lane] = seconds[row, here]
                draws[row, lane] = loads[row, here]
                running[row, lane] = True
            speed = fair_speeds_of_many(draws, cost.capacities_of_many(names, draws))
            to_go = np.where(running, left / speed, np.inf)
            step = to_go.min(axis=1)
            if not np.isfinite(step).all():
                raise DeadlockError(f"tasks of a layer never end, in one of {self.stamps}")
            now = now + step
            left = left - speed * step[:, None]
            ended = running & (to_go <= step[:, None] * (1 + ROUNDING))
            done = done + ended
            running = running & ~ended
            draws[ended] = 0.0
            of_gpu = ended[:, GPU]
            for column, layer in enumerate(marks):
                hit = of_gpu & (done[:, GPU] == ends[:, layer])
                at_s[live[hit], column] = now[hit]
            on = done[:, GPU] < until
            if not on.all():
                live, now, done, running = live[on], now[on], done[on], running[on]
                left, draws, base, until = left[on], draws[on], base[on], until[on]
                seconds, loads, ends = seconds[on], loads[on], ends[on]
        first_s, next_s = np.diff(at_s, axis=1).T
        # Slots that fill between the steps save nothing: they are as full as that in a long run.
        return first_s / of.paced, np.maximum(0.0, next_s - first_s)


@lru_cache(maxsize=4096)
def _stamped(x: _Layer, of: _Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kinds and needs of all lanes' tasks over the layers, and where layers end on the GPU."""
    tasks = _tasks(x)
    sizes = np.array([len(lane) for lane in tasks])
    # Between the steps: the tasks of each lane, and what they need of others'.
    between = {
        GPU: [("leave", []), ("enter", [(ACT, 0), (BULK, 0)])],
        BULK: [("copy_ahead", [])],
        KV: [("fetch_ahead", [(ACT, 0)])],
        ACT: [("turn", [(GPU, 0)])],
    }
    more = np.array([len(between.get(lane, ())) for lane in range(5)])
    longest = int((sizes * of.layers + more).max())
    kind = np.zeros((5, longest), dtype=np.int64)
    need = np.full((5, longest, 5), np.iinfo(np.int32).max, dtype=np.int32)
    begin = np.arange(of.layers)
    of_step = begin >= of.before  # layers of the second step come after what lies between
    for lane, of_layer in enumerate(tasks):
        n = len(of_layer)
        wanted = np.zeros((of.layers, n, 5), dtype=np.int64)
        for i, (_, waits) in enumerate(of_layer):
            for other, later, place in waits:
                layer = begin + later
                count = layer * sizes[other] + place + 1 + more[other] * (layer >= of.before)
                wanted[:, i, other] = np.maximum(wanted[:, i, other], count)
        if lane == KV:
            # KV is fetched by the row table of its step.
            turned = of.before * sizes[ACT] + more[ACT]
            wanted[of_step, :, ACT] = np.maximum(wanted[of_step, :, ACT], turned)
        # Layers of the pattern have durations of their own, one behind the other.
        names = np.array([AT[name] for name, _ in of_layer], dtype=np.int64)
        kinds = names + (begin % of.period)[:, None] * len(KINDS)
        place = (begin[:, None] * n + np.arange(n) + more[lane] * of_step[:, None]).reshape(-1)
        kind[lane, place] = kinds.reshape(-1)
        need[lane, place] = wanted.reshape(-1, 5)
        for i, (name, waits) in enumerate(between.get(lane, ())):
            place = of.before * n + i
            kind[lane, place] = AT[name]
            need[lane, place] = 0
            for other, j in waits:
                need[lane, place, other] = of.before * sizes[other] + j + 1
    return kind, need, (begin + 1) * sizes[GPU] + more[GPU] * of_step
