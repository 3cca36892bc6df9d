"""What the executor allocates is at most what the ledger says, line by line."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tiny import tiny_deepseek_v2, tiny_mixtral  # noqa: E402

from moegen.exec import layout, step  # noqa: E402
from moegen.exec.arena import Arena, ArenaFull  # noqa: E402
from moegen.exec.buffers import Buffers  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.families import family_for  # noqa: E402
from moegen.exec.generate import Generation, SequenceState  # noqa: E402
from moegen.exec.kv import KVStore  # noqa: E402
from moegen.exec.lanes import forget_gpu_memory  # noqa: E402
from moegen.exec.layout import Layout  # noqa: E402
from moegen.exec.primitives import reference  # noqa: E402
from moegen.exec.program import Machinery, Program  # noqa: E402
from moegen.exec.step import Row, Step  # noqa: E402
from moegen.exec.torch_attention import TorchDecode  # noqa: E402
from moegen.graph import allocator, sizes, working  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.hardware import HardwareSpec  # noqa: E402
from moegen.graph.layer import Attention  # noqa: E402
from moegen.graph.memory import cpu_stretches, memory  # noqa: E402
from moegen.graph.model import ModelSpec  # noqa: E402
from moegen.graph.ops import OPS  # noqa: E402
from moegen.graph.strategy import Plan, Strategy  # noqa: E402
from moegen.graph.task import Lane  # noqa: E402
from moegen.graph.workload import Workload  # noqa: E402

# The ledger's line of each tensor of Buffers, and what is left: the GPU lane's own.
GPU_LINES = {
    "rows": "row table",
    "counts": "row table",
    "tokens": "row table",
    "dense": "dense slots",
    "expert": "expert slots",
    "q": "queries, keys and values",
    "new_kv": "queries, keys and values",
    "kv": "KV slots",
    "attn_out": "attention output",
    "logits": "logits",
}
HOST_LINES = {
    "host_rows": "row table",
    "host_counts": "row table",
    "host_tokens": "row table",
    "host_q": "queries and outputs staged",
    "host_new_kv": "queries and outputs staged",
    "host_attn": "queries and outputs staged",
    "host_logits": "",
}
OWN = (
    "hidden states",
    "positions",
    "routing",
    "outputs by expert",
    "shared experts' output",
    "temporaries",
)
# On a CPU it takes less than on CUDA, where programs share a row.
NOT_AS_ON_CUDA = "attn_gpu"
LANE = [op for op, x in OPS.items() if x.lane is Lane.GPU and op != NOT_AS_ON_CUDA]


def lines_of(section) -> dict[str, int]:
    return {line.name: line.bytes for line in section.lines}


def own(ledger) -> int:
    return sum(lines_of(ledger.gpu).get(name, 0) for name in OWN)


def check_buffers(buffers: Buffers, ledger) -> None:
    """Every tensor of ``buffers`` has a line, and no line less than its tensors."""
    tensors = {k: t for k, t in vars(buffers).items() if isinstance(t, torch.Tensor)}
    assert tensors.keys() == GPU_LINES.keys() | HOST_LINES.keys()
    for section, of in ((ledger.gpu, GPU_LINES), (ledger.host, HOST_LINES)):
        held = Counter()
        for name, line in of.items():
            held[line] += tensors[name].nbytes
        said = lines_of(section)
        assert {k: n for k, n in held.items() if n > said.get(k, 0)} == {}


# -- real widths, on meta tensors


def meta_program(model, graph, capacity):
    family = family_for(model, torch.bfloat16, "meta")
    dense = [Layout.of(family.dense_layout(i), family.dtype_of) for i in range(model.n_layers)]
    experts = [
        Layout.of(family.expert_layout(i), lambda _: family.dtype) if x.n_experts else None
        for i, x in enumerate(model.layers)
    ]
    head = Layout.of(family.head_layout(), family.dtype_of)
    blobs = [None] * model.n_layers
    weights = SimpleNamespace(
        dense_layouts=dense, expert_layouts=experts, dense=blobs, experts=blobs
    )
    machinery = Machinery(
        family=family,
        weights=weights,  # type: ignore[arg-type]
        device=torch.device("meta"),
        head=head.view(torch.empty(head.nbytes, dtype=torch.uint8, device="meta")),
        decode=TorchDecode(1),
    )
    store = SimpleNamespace(pinned=True)
    return Program(graph, machinery, store, capacity, lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("b_e", [8192, 256])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "n_layers"),
    [("mixtral-8x7b", 2), ("mixtral-8x22b", 1), ("deepseek-v2-lite", 3), ("deepseek-v2", 2)],
)
def test_at_real_widths(name, n_layers, phase, b_e, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK", 1 << 50)  # fewer calls
    model = ModelSpec.from_pretrained(name).with_(n_layers=n_layers)
    rows, prompt, gen = (64 if phase == "prefill" else 1024), 512, 256
    s = Strategy(B=rows, b_a=8, b_e=b_e, omega=0.0, s_expert=3 * model.expert_bytes)
    work = Workload.uniform(rows, prompt, gen)
    ledger = memory(model, HardwareSpec.from_name("h200"), s, work, phase=phase)
    prefill = phase == "prefill"
    graph = build(model, s, phase, lengths=[prompt if prefill else prompt + gen - 1] * rows)
    shape, where = graph.shape, graph.layout
    assert shape is not None and where is not None
    context = [n + 1 for n in shape.past]
    p = meta_program(model, graph, sizes.Capacity.of(phase, where, shape.new, context))
    check_buffers(p.buffers, ledger)
    live = [Row(0, past, [1] * new) for past, new in zip(shape.past, shape.new, strict=True)]
    bound = Step(where, live)
    for i, layer in enumerate(model.layers):
        # Every token takes the same experts: no tile is larger than these.
        mine = [bound.n_tokens] * layer.top_k
        bound.counts[i] = mine + [0] * (layer.n_experts - layer.top_k)
    kept, taken = p.arena.peak, Counter()
    with torch.inference_mode():
        for task in graph:
            op = task.id.op
            if op in LANE:
                p.arena.peak = 0
                p.kernels[op](p, task, 0, bound)
                taken[op] = max(taken[op], p.arena.peak - kept)
    # Op by op the plan is what was taken, no less and no more.
    capacity = sizes.Capacity.worst(s, work, phase)
    planned = Counter()
    for frame in working.frames(model, s, phase, capacity):
        planned[frame.op] = max(planned[frame.op], frame.bytes)
    attention = planned.pop(NOT_AS_ON_CUDA, 0)
    assert {op: n for op, n in taken.items() if n > 0} == {op: n for op, n in planned.items() if n}
    assert kept + max(*taken.values(), attention) == own(ledger) == p.arena.block.numel()


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 300),
    longest=st.integers(1, 9000),
    heads=st.sampled_from([(32, 8, 128), (8, 8, 64), (48, 8, 128), (128, 0, 512), (16, 0, 512)]),
    a=st.sampled_from([2, 4]),
)
def test_parts_of_decode_attention(rows, longest, heads, a):
    n_heads, n_kv_heads, d = heads
    if n_kv_heads:
        at = Attention("gqa", n_heads, n_kv_heads, d, d)
    else:
        at = Attention("mla", n_heads, n_heads, 192, 128, kv_lora_rank=d, rope_head_dim=64)
    capacity = sizes.Capacity(rows, rows, rows, 1, part_rows=rows, longest=longest)
    block = working.decode_block(d, a, not n_kv_heads)
    kv_heads = n_kv_heads or 1
    tiles = kv_heads * -(-(n_heads // kv_heads) // working.HEAD_TILE)

    def taken(r, length):
        # As the kernel's launcher asks for it.
        split = -(-length // working.decode_split(length, r * tiles, block))
        parts = sizes.aligned(r * n_heads * split * d * 4, r * n_heads * split * 4)
        return sizes.aligned(8 * r, 8 * r) + (parts if split > 1 else 0)

    # Beyond these no row is split but for its length, and no more for being longer.
    most_split = working.SPLIT_PROGRAMS // tiles + 1
    lengths = {longest, *range(block, min(longest, most_split * block) + 1, block)}
    few = {rows, *range(1, min(rows, most_split) + 1)}
    most = max(taken(r, n) for r, n in itertools.product(few, lengths))
    planned = working._attn_gpu(at, capacity, a)
    assert most <= planned <= most + sizes.aligned(8 * rows, 8 * rows)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
@pytest.mark.parametrize("lengths", [[1024] * 9, [1025] * 9, [5000, *[3] * 20], [70_000, 9000, 2]])
def test_long_rows_on_the_cpu(name, lengths):
    """What the compiled kernel keeps of their stretches, and what torch makes of all rows."""
    model = ModelSpec.from_pretrained(name).with_(n_layers=2)
    n = len(lengths)
    s = Strategy(B=n, b_a=1, b_e=8, omega=1.0)
    work = Workload.from_lengths([x - 1 for x in lengths], [1] * n)
    at = model.layers[0].attention
    width = at.out_width("decode")
    stretches = sum(cpu_stretches(x) for x in lengths if x > 1024)
    compiled = 4 * stretches * (width + 2 * at.n_heads)
    fallback = 2 * n * (at.q_width("decode") + 2 * width)
    said = lines_of(memory(model, HardwareSpec.from_name("h200"), s, work).host)
    assert said["attention on the CPU"] >= max(compiled, fallback)
    if max(lengths) <= 1025:  # and no more than that where rows are alike
        assert said["attention on the CPU"] == max(compiled, fallback)


def test_an_arena_gives_no_more_than_was_planned():
    arena = Arena(1280, torch.device("cpu"))
    a = arena.take(3, 5, dtype=torch.float32)
    with arena.frame():
        b = arena.take(128, dtype=torch.int64)  # 1024 bytes behind the first 256
        assert b.data_ptr() == a.data_ptr() + 256
        with pytest.raises(ArenaFull, match=r"1 B .* in use"):
            arena.take(1, dtype=torch.uint8)
    assert arena.peak == 1280
    with arena.frame():
        again = arena.take(90, dtype=torch.int64)
    assert again.data_ptr() == b.data_ptr()


# -- whole runs, lengths mixed


@pytest.fixture(scope="module", params=["mixtral", "mixtral-window", "deepseek", "deepseek-q-lora"])
def engine(request, tmp_path_factory):
    make, over = {
        "mixtral": (tiny_mixtral, {}),
        "mixtral-window": (tiny_mixtral, {"sliding_window": 7}),
        "deepseek": (tiny_deepseek_v2, {}),
        # Widths that alignment pads.
        "deepseek-q-lora": (tiny_deepseek_v2, {"q_lora_rank": 20, "attention_bias": True}),
    }[request.param]
    path, _ = make(tmp_path_factory.mktemp(request.param), num_hidden_layers=2, **over)
    with Engine.from_pretrained(path, device="cpu", dtype="bfloat16") as e:
        yield e


@pytest.fixture
def measured(monkeypatch):
    """Buffers and arenas of a run, by phase."""
    seen = SimpleNamespace(buffers=defaultdict(list), arenas=defaultdict(list))

    class Seen(Program):
        def __init__(self, graph, *args, **kwargs):
            super().__init__(graph, *args, **kwargs)
            seen.buffers[graph.phase].append(self.buffers)
            seen.arenas[graph.phase].append(self.arena)

    monkeypatch.setattr("moegen.exec.generate.Program", Seen)
    return seen


PROMPTS = [40, 1, 1, 7, 1, 23, 1, 2, 1]
GENS = [3, 9, 2, 5, 1, 4, 7, 3, 6]


@pytest.mark.parametrize("omega", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(("b_a", "b_e", "wave"), [(1, 1, 4), (2, 5, 9), (8, 64, 3)])
def test_of_whole_runs(engine, measured, omega, b_a, b_e, wave):
    decode = Strategy(B=9, b_a=b_a, b_e=b_e, omega=omega, s_expert=2 * engine.model.expert_bytes)
    plan = Plan(prefill=decode.with_(B=wave, omega=0.0), decode=decode)
    machinery, model = engine.machinery, engine.model
    rows = [
        SequenceState(i, [(3 * i + k) % 100 + 3 for k in range(n)], gen)
        for i, (n, gen) in enumerate(zip(PROMPTS, GENS, strict=True))
    ]
    store = KVStore(model, sum(row.room for row in rows), machinery.family.dtype, pin=False)
    Generation(machinery, plan, frozenset()).run(rows, store)
    assert [len(row.out) for row in rows] == GENS
    work = Workload.from_lengths(PROMPTS, GENS)
    for phase, s in (("prefill", plan.prefill), ("decode", plan.decode)):
        ledger = memory(model, engine.prepared.capacities, s, work, phase=phase)
        assert measured.buffers[phase]
        for buffers in measured.buffers[phase]:
            check_buffers(buffers, ledger)
        for arena in measured.arenas[phase]:
            assert 0 < arena.peak <= arena.block.numel() <= own(ledger)
        held = lines_of(memory(model, engine.prepared.capacities, decode, work).host)
        assert store.nbytes <= held["KV store"]
        packed = sum(b.nbytes for b in (*engine.weights.dense, engine.weights.head))
        packed += sum(b.nbytes for b in engine.weights.experts if b is not None)
        said = lines_of(ledger.host)
        assert packed <= said["weights"] + said.get("weights as packed", 0)


@pytest.mark.parametrize("b_e", [1, 6, 4096])
def test_rows_that_are_alike_take_what_was_planned(engine, measured, b_e):
    """To the byte: the plan is no looser than it must be."""
    prompt, gen, n = 12, 3, 6
    # With every row on the CPU no part of the plan is for what CUDA alone takes.
    decode = Strategy(B=n, b_a=2, b_e=b_e, omega=1.0)
    plan = Plan(prefill=decode.with_(B=3, omega=0.0), decode=decode)
    engine = Engine(engine.prepared.with_plan(plan), engine.weights)
    try:
        prompts = [[(7 * i + k) % 100 + 3 for k in range(prompt)] for i in range(n)]
        engine.generate(prompts, gen, ignore_eos=True)
    finally:
        engine.machinery.decode.close()
    work = Workload.uniform(n, prompt, gen)
    for phase, s in (("prefill", plan.prefill), ("decode", plan.decode)):
        ledger = memory(engine.model, engine.prepared.capacities, s, work, phase=phase)
        (arena,) = measured.arenas[phase]
        assert arena.block.numel() == own(ledger)
        most = working.largest_frame(engine.model, s, phase, sizes.Capacity.worst(s, work, phase))
        if most.op == "expert":  # whose tokens depend on the routing
            assert b_e > 1 and arena.peak <= own(ledger)
        else:
            assert arena.peak == own(ledger)


def test_a_phase_is_gone_before_the_next_begins(engine, monkeypatch):
    programs = []

    class Seen(Program):
        def __init__(self, *args, **kwargs):
            assert [p() for p in programs if p() is not None] == []
            super().__init__(*args, **kwargs)
            programs.append(weakref.ref(self))

    monkeypatch.setattr("moegen.exec.generate.Program", Seen)
    gc.collect()
    gc.disable()
    try:
        engine.generate([[5, 9], [7], [8]], [2, 5, 3], ignore_eos=True)
    finally:
        gc.enable()
    assert len(programs) > 2


# -- what two places say


def test_constants_of_both_sides():
    assert layout.ALIGN == sizes.ALIGN_BYTES
    assert len(step.TOKEN_COLUMNS) == sizes.TOKEN_COLUMNS
    assert len(step.ROW_COLUMNS) == sizes.ROW_COLUMNS


def test_what_the_allocator_takes():
    MIB = 1 << 20
    assert [allocator.reserved_bytes(n) for n in (0, 1, MIB)] == [0, 2 * MIB, 2 * MIB]
    assert allocator.reserved_bytes(MIB + 1) == allocator.reserved_bytes(20 * MIB) == 20 * MIB
    assert allocator.reserved_bytes(20 * MIB + 1) == 22 * MIB
    model = ModelSpec.from_pretrained("mixtral-8x7b")
    s = Strategy(B=1000, b_a=64, b_e=8192, s_expert=8 * model.expert_bytes, s_params=10**10)
    gpu = memory(model, HardwareSpec.from_name("h200"), s, Workload.uniform(1000, 512, 256)).gpu
    # Four blocks, each rounded up to 2 MiB, and small segments: nothing against what they hold.
    assert 0 < lines_of(gpu)["allocator"] < 16 * MIB < 0.002 * gpu.total_bytes


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "deepseek-v2"])
def test_blobs_as_packed(name):
    spec = ModelSpec.from_pretrained(name)
    family = family_for(spec)
    for i, layer in enumerate(spec.layers):
        dense = Layout.of(family.dense_layout(i), family.dtype_of)
        assert dense.nbytes == sizes.dense_blob_bytes(spec, layer)
        assert len(dense.entries) <= sizes.MOST_TENSORS
        expert = Layout.of(family.expert_layout(i), family.dtype_of)
        assert expert.nbytes == sizes.expert_blob_bytes(spec, layer)


# -- CUDA

# The least that the allocator takes of a small kind, which a plan of 1 GiB cannot share out.
SLACK_BYTES = 48 << 20
WIDE = {
    "mixtral": (
        "mixtral-8x7b",
        {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_hidden_layers": 3,
        },
    ),
    "deepseek": (
        "deepseek-v2-lite",
        {"num_hidden_layers": 3, "n_routed_experts": 16, "intermediate_size": 4096},
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("omega", [0.0, 0.6])
@pytest.mark.parametrize("family", WIDE)
def test_peak_on_cuda(family, omega, monkeypatch):
    name, over = WIDE[family]
    spec = ModelSpec.from_pretrained(name)
    spec = ModelSpec.from_config(spec.hf | over, name=family)
    decode = Strategy(B=96, b_a=16, b_e=2048, omega=omega, s_expert=3 * spec.expert_bytes)
    plan = Plan(prefill=decode.with_(B=48, b_a=4, omega=0.0), decode=decode)
    peaks = {}

    def measuring(phase, method):
        def run(self, *args):
            gc.collect()
            forget_gpu_memory(torch.device("cuda"))
            method(self, *args)
            torch.cuda.synchronize()
            peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_reserved())

        return run

    with Engine.random(spec, plan, device="cuda") as engine:
        for phase in ("prefill", "decode"):
            method = getattr(Generation, f"_{phase}")
            monkeypatch.setattr(Generation, f"_{phase}", measuring(phase, method))
        prompts = [[(7 * i + k) % 1000 + 3 for k in range(512 - i)] for i in range(96)]
        engine.generate(prompts, [4 + i % 5 for i in range(96)], ignore_eos=True)
        for phase, ledger in (("prefill", engine.prefill_ledger), ("decode", engine.ledger)):
            assert ledger is not None
            said = ledger.gpu.total_bytes
            print(
                f"{family} omega {omega} {phase}: {peaks[phase] / 2**20:.0f} MiB held, "
                f"{said / 2**20:.0f} MiB said"
            )
            assert said - SLACK_BYTES <= 1.05 * peaks[phase] <= 1.05 * said
