"""Program: a task graph, its buffers and a model's mathematics, ready for the runner.

It binds each step, knows which task has nothing to do, finds the slot a task uses, and
calls the kernel of its op. Kernels keep what stays within the GPU lane (hidden states,
routing) in `Scratch`; everything that crosses lanes is a ring slot in `Buffers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moegen.errors import GraphError
from moegen.exec.arena import Arena
from moegen.exec.attention import CpuDecode
from moegen.exec.buffers import Buffers, Capacity
from moegen.exec.families.base import Family
from moegen.exec.kernels import KERNELS
from moegen.exec.kv import KVStore
from moegen.exec.lanes import give_back_gpu_memory
from moegen.exec.layout import Layout
from moegen.exec.step import Span, Step
from moegen.exec.transfer import transfer_for
from moegen.exec.weights import HostWeights
from moegen.graph.model import ModelSpec, Phase
from moegen.graph.ops import expert_range
from moegen.graph.residency import Residency, residency
from moegen.graph.sizes import aligned
from moegen.graph.task import Task, TaskGraph, Value
from moegen.graph.working import kept_pieces, working_bytes

# Experts of one task with fewer tokens than this on average are computed in one product of
# several matrices, by kind of device; elsewhere never.
GROUPED_BELOW_TOKENS = {"cuda": 256}


@dataclass
class Machinery:
    """What outlives a graph: the model's weights and mathematics on one device.

    Attributes
    ----------
    head : mapping of str to Tensor
        Embedding, final norm and output matrix, on the device.
    decode : CpuDecode
        The CPU's attention, with its threads.
    """

    family: Family
    weights: HostWeights
    device: torch.device
    head: Mapping[str, Tensor]
    decode: CpuDecode
    resident_dense: dict[int, Tensor] = field(default_factory=dict)
    resident_experts: dict[int, Tensor] = field(default_factory=dict)
    kept: Residency | None = None

    def close(self) -> None:
        """Stop threads and let go of what is on the device; nothing can be run any more."""
        self.decode.close()
        self.head, self.resident_dense, self.resident_experts = {}, {}, {}
        self.kept = None
        give_back_gpu_memory(self.device)

    def keep(self, s_params: int) -> None:
        """Bring the weights that ``s_params`` keeps to the device, in one block."""
        kept = residency(self.family.spec, s_params)
        if kept == self.kept:
            return
        # All of it anew: what two layouts have in common would lie in the way of one block.
        self.resident_dense, self.resident_experts, self.kept = {}, {}, None
        give_back_gpu_memory(self.device)
        dense = {i: self.weights.dense[i] for i, whole in enumerate(kept.dense) if whole}
        experts = {
            i: blobs[:n]
            for i, (blobs, n) in enumerate(zip(self.weights.experts, kept.experts, strict=True))
            if n and blobs is not None
        }
        if self.device.type != "cpu":
            sizes = [t.nbytes for t in (*dense.values(), *experts.values())]
            block = Arena(aligned(*sizes), self.device)
            dense, experts = (
                {i: block.take(*t.shape, dtype=t.dtype).copy_(t) for i, t in some.items()}
                for some in (dense, experts)
            )
        self.resident_dense, self.resident_experts, self.kept = dense, experts, kept


class Scratch:
    """Values that stay within the GPU lane, from one of its kernels to the next.

    T tokens, R rows, H hidden, E experts, k experts a token; each as large as the largest step
    wants it. `moegen.graph.working` says which there are.
    """

    x: Tensor  # residual stream [T, H]
    h: Tensor  # normed [T, H]
    cos: Tensor  # of this step's positions [T, rotated width / 2]
    sin: Tensor
    prompt_ends: Tensor  # running sums of each micro-batch's prompts [2 R], in prefill
    ids: Tensor  # experts of each token [T, k]
    gates: Tensor  # and their weights [T, k]
    order: Tensor  # token of each place [T k]
    inverse: Tensor  # place of each choice [T, k]
    expert_ends: Tensor  # one past each expert's last place [E]
    outputs: Tensor  # by expert [T k, H]
    shared: Tensor  # [T, H]

    def __init__(
        self, model: ModelSpec, phase: Phase, capacity: Capacity, dtype: torch.dtype, arena: Arena
    ) -> None:
        kinds = {"activation": dtype, "float32": torch.float32, "int32": torch.int32}
        for name, piece in kept_pieces(model, phase, capacity).items():
            setattr(self, name, arena.take(*piece.shape, dtype=kinds[piece.kind]))


class Program:
    """A graph bound to buffers and kernels: what `moegen.exec.runner.Runner` runs.

    Parameters
    ----------
    graph : TaskGraph
    machinery : Machinery
    store : KVStore
    capacity : Capacity
        The largest step that ``source`` will ever bind.
    source : callable
        Given the program and a step's index, the rows of that step in batch order, or None
        when the run is over. It is called once the tokens of the step before are on the host
        (``program.sampled``).
    keep_logits : bool
        Bring each step's logits down too.
    """

    def __init__(
        self,
        graph: TaskGraph,
        machinery: Machinery,
        store: KVStore,
        capacity: Capacity,
        source: Callable[[Program, int], Step | None],
        *,
        keep_logits: bool = False,
    ) -> None:
        if graph.model is None or graph.strategy is None or graph.layout is None:
            raise GraphError("a graph made by hand can be simulated, but has no kernels to run")
        self.graph, self.machinery, self.store = graph, machinery, store
        self.model, self.strategy = graph.model, graph.strategy
        self.phase: Phase = graph.phase
        self.kernels = KERNELS
        self.source, self.keep_logits = source, keep_logits
        self.transfer = transfer_for(machinery.device, pinned=store.pinned)
        self.family = machinery.family
        self.kept = residency(graph.model, graph.strategy.s_params)
        # What a program before this one had is often of other sizes: pieces of it would stay.
        give_back_gpu_memory(machinery.device)
        machinery.keep(graph.strategy.s_params)
        weights = machinery.weights
        self.buffers = Buffers(
            graph,
            capacity,
            dense_nbytes=max(x.nbytes for x in weights.dense_layouts),
            expert_nbytes=max((x.nbytes for x in weights.expert_layouts if x), default=0),
            dtype=machinery.family.dtype,
            device=machinery.device,
            keep_logits=keep_logits,
        )
        self.arena = Arena(
            working_bytes(self.model, self.strategy, self.phase, capacity), machinery.device
        )
        self.scratch = Scratch(self.model, self.phase, capacity, machinery.family.dtype, self.arena)
        self.grouped_below = GROUPED_BELOW_TOKENS.get(machinery.device.type, 0)
        # The row table's columns of the step that each of its slots holds.
        self._columns: dict[int, tuple[Step, dict[str, Tensor]]] = {}
        self._views: dict[Hashable, dict[str, Tensor]] = {}
        self._ranks = Counter(t.id.layer for t in graph.tasks if t.id.op == "expert")
        for layer in self._ranks:
            self._ranks[layer] *= graph.strategy.expert_group
        self._values = {
            (t.id, v.buffer): v
            for t in graph.tasks
            for v in (*t.reads, *t.writes)
            if not v.distance
        }

    # -- what the runner asks ----------------------------------------------------------

    def next_step(self, index: int) -> Step | None:
        return self.source(self, index)

    def needs_step(self, task: Task) -> bool:
        op = task.id.op
        return op != "copy_dense" and (op != "copy_expert" or self.strategy.fetch == "routed")

    def host_value(self, task: Task, step: Step) -> None:
        layer = task.id.layer
        if layer not in step.counts:
            n = self.model.layers[layer].n_experts
            step.counts[layer] = counts = self.buffers.host_counts[:n].tolist()
            active = sum(c > 0 for c in counts)
            if self.strategy.fetch == "routed" and active > self._ranks[layer]:
                raise GraphError(
                    f"layer {layer} has {active} active experts and the graph tasks for "
                    f"{self._ranks[layer]}: it was built for fewer tokens"
                )

    def is_empty(self, task: Task, step: Step | None) -> bool:
        op, m = task.id.op, task.id.microbatch
        if step is None:
            return False
        if op in ("send_qkv", "attn_cpu", "recv_attn"):
            return step.cpu.rows == 0
        if op == "expert":
            return not any(step.counts[task.id.layer][e] for e in self.experts(task, step))
        if op == "copy_expert":
            return not self.copied_experts(task, step)
        if op == "append_kv" and m < 0:
            return step.gpu.rows == 0
        return m >= 0 and step.span(m).rows == 0

    def run(self, task: Task, index: int, step: Step | None) -> None:
        self.kernels[task.id.op](self, task, index, step)

    # -- what kernels ask --------------------------------------------------------------

    def slot(self, buffer: str, task: Task, index: int) -> int:
        """The slot of ``buffer`` that ``task`` uses in step ``index``."""
        value: Value = self._values[task.id, buffer]
        return self.graph.rings[buffer].slot(index, value.index)

    def span(self, task: Task, step: Step) -> Span:
        """The share of the batch that ``task`` works on."""
        return step.span(task.id.microbatch)

    def columns(self, step: Step, index: int) -> dict[str, Tensor]:
        """The step's row table on the device, by column."""
        slot = self.graph.rings["rows"].slot(index, 0)
        known = self._columns.get(slot)
        if known is None or known[0] is not step:
            known = self._columns[slot] = step, step.columns(self.buffers.rows[slot])
        return known[1]

    def prompt_ends(self, microbatch: int, span: Span) -> Tensor:
        """Running sums, from 0, of the prompts of a wave's micro-batch: int32 [rows + 1]."""
        first = span.r0 + microbatch
        return self.scratch.prompt_ends[first : first + span.rows + 1]

    def history(self, task: Task, step: Step, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the GPU rows of ``task`` have their history: first token in the store, tokens,
        first token in the slot, int64 [rows] each. A sliding window leaves out the oldest."""
        span, c = self.span(task, step), self.columns(step, index)
        start, past, to = (c[name][span.r0 : span.r1] for name in ("start", "past", "slot_start"))
        window = self.model.layers[task.id.layer].attention.window
        if window is not None:
            skipped = (past - (window - 1)).clamp_min(0)
            start, past = start + skipped, past - skipped
        return start, past, to

    def dense(self, task: Task, index: int) -> dict[str, Tensor]:
        """A layer's dense weights, from its slot or for good."""
        layer = task.id.layer
        layout = self.machinery.weights.dense_layouts[layer]
        if self.kept.dense[layer]:
            resident = self.machinery.resident_dense[layer]
            return self._named(layout.view, layout, ("dense", layer), lambda: resident)
        slot = self.slot("dense_weights", task, index)
        return self._named(layout.view, layout, slot, lambda: self.buffers.dense[slot])

    def _named(
        self,
        view: Callable[[Tensor], dict[str, Tensor]],
        layout: Layout,
        where: Hashable,
        flat: Callable[[], Tensor],
    ) -> dict[str, Tensor]:
        """Views of the bytes at ``where``, made once: they never move, and a view costs Python."""
        key = id(layout), where
        if key not in self._views:
            self._views[key] = view(flat())
        return self._views[key]

    def experts(self, task: Task, step: Step | None) -> Sequence[int]:
        """The experts that an ``expert`` or ``copy_expert`` task stands for in this step."""
        layer, first, group = task.id.layer, task.id.expert, self.strategy.expert_group
        if self.strategy.fetch == "routed":
            assert step is not None
            active = [e for e, n in enumerate(step.counts[layer]) if n]
            return active[first : first + group]
        n, resident = self.model.layers[layer].n_experts, self.kept.experts[layer]
        return expert_range(n, resident, group, first)

    def copied_experts(self, task: Task, step: Step | None) -> list[tuple[int, int]]:
        """(place in the slot, expert) of what a ``copy_expert`` task copies."""
        resident = self.kept.experts[task.id.layer]
        return [(i, e) for i, e in enumerate(self.experts(task, step)) if e >= resident]

    def expert_weights(self, task: Task, index: int, place: int, expert: int) -> dict[str, Tensor]:
        """Weights of the ``place``-th expert of a task."""
        layer = task.id.layer
        layout = self.machinery.weights.expert_layouts[layer]
        assert layout is not None
        if expert < self.kept.experts[layer]:
            resident = self.machinery.resident_experts[layer]
            return self._named(layout.view, layout, (layer, expert, 1), lambda: resident[expert])
        slot = self.slot("expert_weights", task, index)
        return self._named(
            layout.view,
            layout,
            (slot, place),
            lambda: self.expert_place(self.buffers.expert[slot], layer, place),
        )

    def stacked_weights(
        self, task: Task, index: int, place: int, experts: Sequence[int]
    ) -> dict[str, Tensor]:
        """Weights of neighbouring experts of a task, from its ``place``-th on, as stacks."""
        layer, n = task.id.layer, len(experts)
        layout = self.machinery.weights.expert_layouts[layer]
        assert layout is not None
        first = experts[0]
        if first < self.kept.experts[layer]:
            resident = self.machinery.resident_experts[layer]
            return self._named(
                layout.stacked,
                layout,
                (layer, first, n),
                lambda: resident[first : first + n].view(-1),
            )
        slot = self.slot("expert_weights", task, index)
        return self._named(
            layout.stacked,
            layout,
            ("stack", slot, place, n),
            lambda: self.expert_place(self.buffers.expert[slot], layer, place, n),
        )

    def expert_place(self, slot: Tensor, layer: int, place: int, n: int = 1) -> Tensor:
        """Bytes of ``n`` experts in a slot, from the ``place``-th on."""
        layout = self.machinery.weights.expert_layouts[layer]
        assert layout is not None
        return slot[place * layout.nbytes : (place + n) * layout.nbytes]

    def sampled(self, step: Step) -> list[int]:
        """The step's tokens, by live row; they are on the host."""
        return self.buffers.host_tokens[: step.n_rows].tolist()

    def logits(self, step: Step) -> Tensor:
        """The step's logits [R, V], a copy; only with ``keep_logits``."""
        return self.buffers.host_logits[: step.n_rows].clone()
