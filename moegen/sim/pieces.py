"""What each kind of task of a layer takes, for many strategies at once.

Tasks of a kind are alike within a layer: every copy of a group of experts, every micro-batch but
the last. So a strategy is a column of some fifteen durations, and of thousands of strategies most
durations are the same ones. Each distinct one is asked of the operations and of the cost model,
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from moegen.graph.company import RESOURCES
from moegen.graph.many import FETCHES, Groups, Kept, Strategies, passing_groups, weight_slots
from moegen.graph.model import ModelSpec, Phase
from moegen.graph.ops import OPS
from moegen.graph.residency import residency
from moegen.graph.shape import Part, Shape, Sizes
from moegen.graph.strategy import Strategy
from moegen.graph.task import NO_WORK, Lane, Layout, Task, TaskId
from moegen.graph.workload import Workload
from moegen.sim.cost import CostModel

# Kinds of tasks by lane, in the order in which a layer queues them.
LANES = {
    Lane.GPU: (
        "pre_attn", "attention", "last_attention", "post_attn", "route", "shared", "resident",
        "expert", "combine",
    ),
    Lane.BULK: ("copy_dense", "copy_expert"),
    Lane.KV: ("fetch_kv", "last_fetch", "append_kv"),
    Lane.ACT: ("send_qkv", "recv_attn", "copy_counts"),
    Lane.CPU: ("attn_cpu",),
}  # fmt: skip
# And what lies between the layers of one step and those of the next: logits and sampling, the new
# row table, the layers ahead of the pattern, their weights and their KV.
BETWEEN = {
    Lane.GPU: ("leave", "enter"),
    Lane.BULK: ("copy_ahead",),
    Lane.KV: ("fetch_ahead",),
    Lane.ACT: ("turn",),
}
KINDS = tuple(kind for lanes in (LANES, BETWEEN) for kinds in lanes.values() for kind in kinds)
AT = {kind: i for i, kind in enumerate(KINDS)}
# What a step does outside its layers.
_ENDS = {"leave": ("lm_head", "sample"), "turn": ("copy_tokens", "copy_rows"), "enter": ("embed",)}


@dataclass(frozen=True, eq=False)
class Pieces:
    """Durations and counts of the tasks of a layer, of many strategies.

    Attributes
    ----------
    seconds : ndarray, shape [layers of the pattern, kinds, strategies]
    loads : ndarray, shape [layers of the pattern, kinds, resources, strategies]
        Units a second that a task draws at full speed.
    draws : ndarray of bool, shape [layers of the pattern, kinds, resources]
        Where loads are other than 0.
    parts, groups, resident : ndarray of int, shape [strategies]
        Micro-batches; groups of experts that are copied, and that stay on the GPU.
    slots, kv_slots, dense_slots : ndarray of int, shape [strategies]
        Of the rings.
    on_cpu, copies_dense, routed : ndarray of bool, shape [strategies]
    ahead, repeats : int
        Layers ahead of the pattern, and those that follow it.
    """

    seconds: np.ndarray
    loads: np.ndarray
    draws: np.ndarray
    parts: np.ndarray
    groups: np.ndarray
    resident: np.ndarray
    slots: np.ndarray
    kv_slots: np.ndarray
    dense_slots: np.ndarray
    on_cpu: np.ndarray
    copies_dense: np.ndarray
    routed: np.ndarray
    ahead: int
    repeats: int

    def __len__(self) -> int:
        return len(self.parts)


def pattern(model: ModelSpec) -> tuple[int, int]:
    """How many layers go ahead, and after how many the others repeat themselves."""
    layers = model.layers
    found = []
    for period in range(1, min(5, len(layers) + 1)):
        differ = [i + 1 for i in range(len(layers) - period) if layers[i] != layers[i + period]]
        found.append((max(differ, default=0), period))
    return min(found)


class Pricer:
    """Prices the tasks of strategies of one phase, at the mean row of a workload.

    Parameters
    ----------
    at : float
        Decode: how far rows are through their answers, 0 to 1.
    """

    def __init__(
        self, model: ModelSpec, cost: CostModel, work: Workload, phase: Phase, at: float = 0.5
    ) -> None:
        self.model, self.cost, self.work = model, cost, work
        self.phase: Phase = phase
        self.at = at
        ahead, period = pattern(model)
        self.ahead = range(ahead)
        self.layers = range(ahead, ahead + period)
        self.repeats = model.n_layers - ahead
        self._rows: dict[int, np.ndarray] = {}
        self._known: dict[tuple, tuple[float, np.ndarray]] = {}

    def rows(self, B: int) -> np.ndarray:
        """Tokens that each of B rows brings (prefill) or has in its KV store (decode).

        Any few neighbours are a sample of all: rows come in no order.
        """
        if B not in self._rows:
            prompts, gens, counts = np.array(self.work.groups, dtype=np.int64).T
            each = prompts
            if self.phase == "decode":
                each = prompts + np.round(self.at * gens).astype(np.int64)
            if len(counts) == 1:
                self._rows[B] = np.broadcast_to(each[0], (B,))
            else:
                ends = np.cumsum(counts[order := np.argsort(each, kind="stable")])
                # Quantiles in the order of multiples of the golden ratio.
                at = (0.5 + np.arange(B) * 0.6180339887498949) % 1.0 * self.work.n
                self._rows[B] = each[order][
                    np.searchsorted(ends, at, side="right").clip(0, len(ends) - 1)
                ]
        return self._rows[B]

    def cpu_rows(self, B: int, omega: float) -> int:
        """Leading rows that the CPU attends to."""
        if self.phase == "prefill" or omega == 0:
            return 0
        rows = self.rows(B)
        if len(self.work.groups) == 1:
            return min(B, int(np.floor(omega * B + 0.5)))
        taken = np.cumsum(rows + 1)
        return int(np.searchsorted(taken - (rows + 1) / 2, omega * taken[-1], side="right"))

    def __call__(self, s: Strategies) -> Pieces:
        model = self.model
        kept = Kept.of(model, s.s_params)
        groups_of = Groups()
        cpu_values, which = groups_of((s.B, s.omega), lambda B, w: self.cpu_rows(int(B), float(w)))
        cpu = np.array(cpu_values)[which]
        gpu = s.B - cpu
        b_a = np.minimum(s.b_a, np.maximum(1, gpu))
        parts = -(-gpu // b_a)
        last = gpu - (parts - 1) * b_a
        if self.phase == "prefill":
            b_a, last = -(-s.B // parts), s.B // parts
        moe = bool(model.moe_layers)
        spec = model.layers[self.layers[-1]]
        n, group = spec.n_experts, np.minimum(s.expert_group, max(1, spec.n_experts))
        stay = kept.n_experts / max(1, model.n_moe_layers)
        passing = passing_groups(model, s, kept) / max(1, model.n_moe_layers)
        routed = (s.fetch == FETCHES.index("routed")) & moe
        active = n
        if routed.any():
            actives, which = groups_of((s.B,), lambda B: self._active(int(B)))
            active = np.where(routed, np.array(actives)[which], n)
            passing = np.where(routed, -(-active // group) * (passing > 0), passing)
        groups = np.ceil(passing - 1e-9).astype(np.int64)
        left = np.where(routed, active, n - stay)
        at_hand = np.where(routed, np.where(groups > 0, 0, active), stay)
        resident = np.ceil(at_hand / group - 1e-9).astype(np.int64)
        slots, dense_slots = weight_slots(model, s, kept)
        copies = 1 - kept.n_dense / model.n_layers

        shape = (len(self.layers), len(KINDS))
        seconds, loads = np.zeros((*shape, len(s))), np.zeros((*shape, len(RESOURCES), len(s)))
        draws = np.zeros((*shape, len(RESOURCES)), dtype=bool)
        zero, one = np.zeros_like(s.B), np.ones_like(s.B)

        def put(
            p: int, kind: str, op: str, scale: np.ndarray | float, *columns: np.ndarray
        ) -> None:
            """``columns``: B, rows of the CPU, of a micro-batch, b_e, group, fetch: as needed."""
            values, which = groups_of(
                columns or (zero,), lambda *at: self._price(op, self.layers[p], at)
            )
            k = AT[kind]
            seconds[p, k] = np.array([x[0] for x in values])[which] * scale
            drawn = np.array([x[1] for x in values]).T
            draws[p, k] = drawn.any(axis=1)
            for r in np.flatnonzero(draws[p, k]):
                loads[p, k, r] = drawn[r][which]

        for p, index in enumerate(self.layers):
            layer = model.layers[index]
            put(p, "copy_dense", "copy_dense", copies)
            if self.phase == "decode":
                put(p, "pre_attn", "pre_attn", 1.0, s.B)
                put(p, "post_attn", "post_attn", 1.0, s.B)
                put(p, "append_kv", "append_kv", 1.0, gpu)
                # Rows come in no order: any so many are like a batch of their own.
                for kind in ("send_qkv", "attn_cpu", "recv_attn"):
                    put(p, kind, kind, 1.0, cpu, cpu)
                for kind, rest, op in (
                    ("fetch_kv", "last_fetch", "fetch_kv"),
                    ("attention", "last_attention", "attn_gpu"),
                ):
                    put(p, kind, op, 1.0, b_a, zero, b_a)
                    for array in (seconds, loads, draws):
                        array[p, AT[rest]] = array[p, AT[kind]]
                    seconds[p, AT[rest]] *= last / b_a
            else:
                for kind in ("pre_attn", "append_kv", "post_attn"):
                    put(p, kind, kind, 1.0, b_a, zero, b_a)
                put(p, "attention", "attn_prefill", 1.0, b_a, zero, b_a)
            if layer.mlp == "dense":
                put(p, "shared", "dense_mlp", 1.0, s.B, zero, one, s.b_e)
                continue
            put(p, "route", "route", 1.0, s.B, zero, one, s.b_e)
            put(p, "copy_counts", "copy_counts", 1.0, s.B)
            put(p, "combine", "combine", 1.0, s.B)
            if layer.shared_params:
                put(p, "shared", "shared_expert", 1.0, s.B, zero, one, s.b_e)
            # Each copy and each product stands for the mean of all of them.
            share = left / np.maximum(1, groups * group) * np.where(routed, 1 - stay / max(1, n), 1)
            put(p, "copy_expert", "copy_expert", share, zero + 1, zero, one, one, group, zero)
            share = left / np.maximum(1, groups * group)
            put(p, "expert", "expert", share, s.B, zero, one, s.b_e, group, s.fetch)
            share = at_hand / np.maximum(1, resident * group)
            put(p, "resident", "expert", share, s.B, zero, one, s.b_e, group, zero)
        for kind, ops in _ENDS.items():
            for op in ops:
                values, which = groups_of((s.B,), partial(self._seconds, op, -1))
                seconds[0, AT[kind]] += np.array(values)[which]
        # Layers ahead have the attention of the pattern's last layer.
        last = dict(zip(KINDS, seconds[-1], strict=True))
        attends_s = (
            last["pre_attn"]
            + last["post_attn"]
            + np.maximum(
                last["send_qkv"] + last["attn_cpu"] + last["recv_attn"], parts * last["attention"]
            )
        )
        if self.phase == "decode":
            fetches_s = (
                np.maximum(0, parts - 1) * last["fetch_kv"] + (parts > 0) * last["last_fetch"]
            )
            seconds[0, AT["fetch_ahead"]] = len(self.ahead) * fetches_s
        for array in (loads, draws):
            array[0, AT["fetch_ahead"]] = array[-1, AT["fetch_kv"]]
        for i in self.ahead:
            values, which = groups_of(
                (s.B, zero, one, s.b_e), partial(self._seconds, "dense_mlp", i)
            )
            copy_s, drawn = self._price("copy_dense", i, (1,))
            seconds[0, AT["enter"]] += attends_s + np.array(values)[which]
            seconds[0, AT["copy_ahead"]] += copies * copy_s
            loads[0, AT["copy_ahead"]] = drawn[:, None]
            draws[0, AT["copy_ahead"]] = drawn > 0
        return Pieces(
            seconds, loads, draws, parts=parts, groups=groups, resident=resident, slots=slots,
            kv_slots=s.kv_slots, dense_slots=dense_slots, on_cpu=cpu > 0,
            copies_dense=copies > 0, routed=routed, ahead=len(self.ahead),
            repeats=self.repeats,
        )  # fmt: skip

    def _seconds(self, op: str, layer: int, *at: float) -> float:
        return self._price(op, layer, at)[0]

    def _active(self, B: int) -> int:
        return _Point(self, B).active_experts(self.layers[-1])

    def _price(self, op: str, layer: int, at: Sequence[float]) -> tuple[float, np.ndarray]:
        """Seconds of a task, and its loads by resource."""
        key = (op, layer, *at)
        if key not in self._known:
            first = {"expert", "copy_expert"} & {op}
            of_part = {"fetch_kv", "attn_gpu", "attn_prefill"} & {op} or self.phase == "prefill"
            part = 0 if of_part and len(at) > 2 else -1
            task = TaskId(op, self.phase, 0, layer, part, 0 if first else -1)
            z = _Point(self, *(int(x) for x in at))
            work = OPS[op].work(z, task)
            work = work if work.launches else NO_WORK
            estimate = self.cost.estimate(Task(task, OPS[op].lane, (), (), work))
            draws = self.cost.loads(estimate)
            loads = np.array([draws.get(name, 0.0) for name in RESOURCES])
            self._known[key] = estimate.seconds, loads
        return self._known[key]


@lru_cache(maxsize=1024)
def _strategy(b_e: int, group: int, fetch: int) -> Strategy:
    return Strategy(1, 1, b_e, expert_group=group, fetch=FETCHES[fetch])


class _Point(Sizes):
    """Sizes of one layer's tasks without a graph: the first micro-batch stands for all."""

    def __init__(
        self, pricer: Pricer, B: int = 1, cpu: int = 0, part: int = 0, b_e: int = 1,
        group: int = 1, fetch: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.phase = pricer.model, pricer.phase
        self.strategy = _strategy(b_e, group, fetch)
        self.layout = Layout(cpu, (part,))
        self.shape = Shape((), ())
        self.residency = residency(self.model, 0)
        rows = pricer.rows(B)
        if self.phase == "decode":
            self._past, self._new = rows, np.broadcast_to(np.int64(1), (B,))
        else:
            self._past, self._new = np.broadcast_to(np.int64(0), (B,)), rows
        self.all = Part(self._past, self._new)
        self.cpu = self._between(0, cpu)
        self.micro_batches = (self._between(cpu, cpu + part),)
        self.gpu_rows = self._between(cpu, B)
        self._expert_tokens = {}
        self._ranked = {}

    def _between(self, begin: int, end: int) -> Part:
        return Part(self._past[begin:end], self._new[begin:end])
