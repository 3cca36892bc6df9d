"""Module-based batching: the task graph of one prefill wave or one decode step.

The builder walks the layers in program order and says what each task reads and writes;
`moegen.graph.passes.assemble` derives the edges. See the design's "decode step, layer
by layer" and MoE-Gen (arXiv:2503.09716), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from moegen.errors import InvalidInput
from moegen.graph.checks import MOST, whole, wholes
from moegen.graph.model import ModelSpec, Phase
from moegen.graph.ops import OPS, expert_range
from moegen.graph.passes import assemble
from moegen.graph.residency import residency
from moegen.graph.shape import Shape
from moegen.graph.sizes import BufferSizes, Capacity
from moegen.graph.strategy import Strategy
from moegen.graph.task import Layout, Ring, Task, TaskGraph, TaskId, Value
from moegen.graph.waves import even

SCHEDULES = ("module",)
HOST_VALUES = ("host_tokens", "host_counts")


def build(
    model: ModelSpec,
    s: Strategy,
    phase: Phase = "decode",
    *,
    kv_len: int | None = None,
    prompt_len: int | None = None,
    lengths: Sequence[int] | None = None,
    kv_slot_tokens: int | None = None,
    schedule: str = "module",
) -> TaskGraph:
    """Build the task graph of one step and bind a shape to it.

    Parameters
    ----------
    model : ModelSpec
    s : Strategy
        With ``lengths`` the batch has as many rows as there are lengths, else ``s.B``.
    phase : {"decode", "prefill"}
    kv_len : int, optional
        Decode: tokens in every row's KV store before the step.
    prompt_len : int, optional
        Prefill: tokens of every prompt.
    lengths : sequence of int, optional
        The same row by row, in batch order: instead of ``kv_len`` or ``prompt_len``.
    kv_slot_tokens : int, optional
        Decode: tokens one KV slot holds; micro-batches are cut to fit. Prefill: tokens a
        micro-batch may have. Unlimited unless given.
    schedule : str
        Only ``"module"`` so far.

    Returns
    -------
    TaskGraph
        The same structure for every shape of as many rows; ``bind`` gives it another.

    Raises
    ------
    InvalidInput
        On an unknown phase or schedule, or lengths that are none or do not fit the phase.
    """
    if phase not in ("decode", "prefill"):
        raise InvalidInput(f'phase must be "decode" or "prefill", got {phase!r}')
    if schedule not in SCHEDULES:
        raise InvalidInput(f"unknown schedule {schedule!r}: known are {', '.join(SCHEDULES)}")
    shape = _shape(s, phase, kv_len, prompt_len, lengths)
    if kv_slot_tokens is not None:
        kv_slot_tokens = whole(kv_slot_tokens, "kv_slot_tokens", at_least=1)
    layout = lay_out(s, phase, shape, kv_slot_tokens)
    step = _Step(model, s, phase, layout, shape)
    return step.graph().bind(shape)


def _shape(
    s: Strategy,
    phase: Phase,
    kv_len: int | None,
    prompt_len: int | None,
    lengths: Sequence[int] | None,
) -> Shape:
    given, other = (kv_len, prompt_len) if phase == "decode" else (prompt_len, kv_len)
    name, wrong = ("kv_len", "prompt_len") if phase == "decode" else ("prompt_len", "kv_len")
    if other is not None:
        raise InvalidInput(f"{wrong} is not a size of the {phase} phase: give {name}")
    if (given is None) == (lengths is None):
        raise InvalidInput(f"give {name} for a uniform batch, or lengths row by row")
    lowest = 0 if phase == "decode" else 1
    if lengths is None:
        each = (whole(given, name, at_least=lowest, at_most=MOST),) * s.B
    else:
        each = wholes(lengths, "lengths", at_least=lowest, at_most=MOST)
    if not each:
        raise InvalidInput("lengths is empty: give one length a row")
    if phase == "decode":
        return Shape(each, (1,) * len(each))
    return Shape((0,) * len(each), each)


def lay_out(s: Strategy, phase: Phase, shape: Shape, slot_tokens: int | None = None) -> Layout:
    """Share the batch's rows between the CPU and the GPU's micro-batches, in order.

    In decode the CPU takes the leading rows whose KV bytes come nearest to ω of all;
    micro-batches have at most ``s.b_a`` rows and ``slot_tokens`` tokens (a row longer
    than that has a micro-batch of its own). Prefill's have rows as alike as can be, as
    `moegen.graph.waves` deals them, where only ``s.b_a`` limits them.
    """
    if phase == "prefill" and slot_tokens is None:
        return Layout(0, tuple(even(shape.rows, -(-shape.rows // s.b_a))))
    if phase == "decode":
        lengths = [n + 1 for n in shape.past]
        cpu = _leading_rows(lengths, s.omega)
    else:
        lengths, cpu = list(shape.new), 0
    batches: list[int] = []
    room = 0
    for n in lengths[cpu:]:
        if batches and batches[-1] < s.b_a and (slot_tokens is None or n <= room):
            batches[-1] += 1
        else:
            batches.append(1)
            room = slot_tokens or 0
        room -= n
    return Layout(cpu, tuple(batches))


def _leading_rows(lengths: Sequence[int], omega: float) -> int:
    """Leading rows whose summed length is nearest to ``omega`` of the total."""
    target, taken = omega * sum(lengths), 0
    for row, n in enumerate(lengths):
        if taken + n / 2 > target:
            return row
        taken += n
    return len(lengths)


class _Step:
    """Emits the tasks of one step in program order."""

    def __init__(
        self, model: ModelSpec, s: Strategy, phase: Phase, layout: Layout, shape: Shape
    ) -> None:
        self.model, self.s, self.layout, self.shape = model, s, layout, shape
        self.phase: Phase = phase
        self.resident = residency(model, s.s_params)
        self.tasks: list[Task] = []
        self.uses: dict[str, int] = {}
        self.values: dict[tuple[str, TaskId], Value] = {}

    def add(
        self,
        op: str,
        layer: int = -1,
        microbatch: int = -1,
        expert: int = -1,
        *,
        reads: Sequence[Value] = (),
        writes: Sequence[Value] = (),
    ) -> None:
        task_id = TaskId(op, self.phase, 0, layer, microbatch, expert)
        self.tasks.append(Task(task_id, OPS[op].lane, tuple(reads), tuple(writes)))

    def new(self, buffer: str) -> Value:
        """The step's next value of ``buffer``."""
        n = self.uses.get(buffer, 0)
        self.uses[buffer] = n + 1
        return Value(buffer, n)

    def graph(self) -> TaskGraph:
        self.rows = self.new("rows")
        self.add("copy_rows", reads=[Value("host_tokens", 0, 1)], writes=[self.rows])
        self.hidden = self.new("hidden")
        self.add("embed", reads=[self.rows], writes=[self.hidden])
        self.dense: dict[int, list[Value]] = {}
        for layer in range(self.model.n_layers):
            self.layer(layer)
        logits, tokens = self.new("logits"), self.new("tokens")
        self.add("lm_head", reads=[self.hidden, self.rows], writes=[logits])
        self.add("sample", reads=[logits], writes=[tokens])
        self.add("copy_tokens", reads=[tokens, logits], writes=[self.new("host_tokens")])
        return assemble(
            self.tasks,
            self.rings(),
            host_values=HOST_VALUES,
            phase=self.phase,
            model=self.model,
            strategy=self.s,
            layout=self.layout,
        )

    def layer(self, layer: int) -> None:
        """One layer-step; every layer of a class gets the same stamp."""
        self.copy_dense(layer)
        if self.phase == "decode":
            self.decode_attention(layer)
        else:
            self.prefill_attention(layer)
        if self.model.layers[layer].mlp == "moe":
            self.experts(layer)
        else:
            hidden = self.new("hidden")
            reads = [self.hidden, self.normed, *self.dense[layer]]
            self.add("dense_mlp", layer, reads=reads, writes=[hidden])
            self.hidden = hidden

    def copy_dense(self, layer: int) -> None:
        if layer in self.dense or layer >= self.model.n_layers:
            return
        if self.resident.dense[layer]:
            self.dense[layer] = []
            return
        value = self.new("dense_weights")
        self.dense[layer] = [value]
        self.add("copy_dense", layer, writes=[value])

    def decode_attention(self, layer: int) -> None:
        qkv, out = self.new("qkv"), self.new("attn_out")
        weights = self.dense[layer]
        self.add("pre_attn", layer, reads=[self.hidden, self.rows, *weights], writes=[qkv])
        if self.layout.cpu_rows:
            sent, host_out = self.new("host_qkv"), self.new("host_attn")
            store = Value("kv_store_cpu", layer)
            self.add("send_qkv", layer, reads=[qkv], writes=[sent])
            reads = [sent, store._replace(distance=1)]
            self.add("attn_cpu", layer, reads=reads, writes=[host_out, store])
            self.add("recv_attn", layer, reads=[host_out], writes=[out])
        store = Value("kv_store", layer)
        fetched = []
        for m in range(len(self.layout.micro_batches)):
            slot = self.new("kv")
            fetched.append(slot)
            reads = [self.rows, store._replace(distance=1)]
            self.add("fetch_kv", layer, m, reads=reads, writes=[slot])
        if self.layout.micro_batches:
            self.add("append_kv", layer, reads=[qkv, self.rows], writes=[store])
        for m, slot in enumerate(fetched):
            self.add("attn_gpu", layer, m, reads=[qkv, slot, self.rows], writes=[out])
        before, self.hidden, self.normed = self.hidden, self.new("hidden"), self.new("normed")
        reads = [before, out, *weights]
        self.add("post_attn", layer, reads=reads, writes=[self.hidden, self.normed])

    def prefill_attention(self, layer: int) -> None:
        before, self.hidden, self.normed = self.hidden, self.new("hidden"), self.new("normed")
        weights = self.dense[layer]
        for m in range(len(self.layout.micro_batches)):
            qkv, out = self.new("qkv"), self.new("attn_out")
            self.add("pre_attn", layer, m, reads=[before, self.rows, *weights], writes=[qkv])
            self.add("append_kv", layer, m, reads=[qkv, self.rows], writes=[self.new("kv_store")])
            self.add("attn_prefill", layer, m, reads=[qkv, *weights], writes=[out])
            reads = [before, out, *weights]
            self.add("post_attn", layer, m, reads=reads, writes=[self.hidden, self.normed])

    def experts(self, layer: int) -> None:
        spec, weights = self.model.layers[layer], self.dense[layer]
        routing, counts = self.new("routing"), self.new("counts")
        host_counts, outputs = self.new("host_counts"), self.new("expert_out")
        self.add("route", layer, reads=[self.normed, *weights], writes=[routing, counts])
        self.add("copy_counts", layer, reads=[counts], writes=[host_counts])
        combined = [self.hidden, routing, outputs]
        if spec.shared_params:
            shared = self.new("shared_out")
            self.add("shared_expert", layer, reads=[self.normed, *weights], writes=[shared])
            combined.append(shared)
        routed = self.s.fetch == "routed"
        if routed:
            # What the routing decides is late; what it does not decide goes first.
            self.copy_dense(layer + 1)
        for first, resident in self.groups(layer):
            reads = [self.normed, routing, host_counts]
            if not resident:
                slot = self.new("expert_weights")
                needs = [host_counts] if routed else []
                self.add("copy_expert", layer, expert=first, reads=needs, writes=[slot])
                reads.append(slot)
            self.add("expert", layer, expert=first, reads=reads, writes=[outputs])
        hidden = self.new("hidden")
        self.add("combine", layer, reads=combined, writes=[hidden])
        self.hidden = hidden

    def groups(self, layer: int) -> list[tuple[int, bool]]:
        """First expert of each task of a layer, and whether its weights stay on the GPU.

        With routed fetch the k-th task stands for the k-th active expert, which is known
        at run time only: as many tasks as experts can be active.
        """
        spec = self.model.layers[layer]
        if self.s.fetch == "routed":
            # A decode step never has more tokens than rows; a later wave may have more than
            # this one.
            few = self.layout.rows * spec.top_k if self.phase == "decode" else spec.n_experts
            most = min(spec.n_experts, few)
            whole = self.resident.experts[layer] == spec.n_experts
            return [(k, whole) for k in range(0, most, self.s.expert_group)]
        resident = self.resident.experts[layer]
        groups, first = [], 0
        while first < spec.n_experts:
            groups.append((first, first < resident))
            first = expert_range(spec.n_experts, resident, self.s.expert_group, first).stop
        return groups

    def rings(self) -> dict[str, Ring]:
        """Slots of every buffer that crosses lanes; never more than a step uses."""
        shape = self.shape
        capacity = Capacity.of(self.phase, self.layout, shape.new, [n + 1 for n in shape.past])
        sizes = BufferSizes(self.model, self.s, self.phase, capacity)
        return {
            name: Ring(name, min(slots, self.uses[name]), self.uses[name], nbytes, where)
            for name, (slots, nbytes, where) in sizes.rings.items()
            if self.uses.get(name)
        }
