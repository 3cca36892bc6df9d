"""What the executor allocates is at most what the ledger says, line by line."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import tiny_deepseek_v2, tiny_mixtral  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from moegen.exec import layout, program, step  # noqa: E402
from moegen.exec.buffers import Buffers  # noqa: E402
from moegen.exec.decode_attention import TorchDecode  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.families import family_for  # noqa: E402
from moegen.exec.generate import Generation, SequenceState  # noqa: E402
from moegen.exec.kernels import KERNELS  # noqa: E402
from moegen.exec.kv import KVStore  # noqa: E402
from moegen.exec.layout import Layout  # noqa: E402
from moegen.exec.program import Machinery, Program  # noqa: E402
from moegen.exec.step import Row, Step  # noqa: E402
from moegen.graph import sizes, working  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.hardware import HardwareSpec  # noqa: E402
from moegen.graph.memory import memory  # noqa: E402
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
    "routing",
    "outputs by expert",
    "shared experts' output",
    "logits",
    "temporaries",
)
# On a CPU it is torch code, with temporaries of its own; on CUDA one kernel.
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


class Tracker(TorchDispatchMode):
    """Bytes of the storages that ops have made and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[int] = set()
        self.bytes = self.peak = 0
        self.off = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and not self.off:
                self.see(t, given)
        return out

    def see(self, t, given=frozenset()) -> None:
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in given or key in self.alive:
            return
        self.alive.add(key)
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self.alive.discard(key)
        self.bytes -= nbytes


@pytest.fixture
def fused(monkeypatch):
    """Attention as fused kernels hold it: an output and a sum a head, never scores."""
    real, trackers = torch.nn.functional.scaled_dot_product_attention, []

    def attention(q, k, v, **kwargs):
        if q.device.type == "meta":
            sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
            out = q.new_empty((*q.shape[:-1], v.shape[-1]))
            del sums
            return out
        for tracker in trackers:
            tracker.off = True
        out = real(q, k, v, **kwargs)
        for tracker in trackers:
            tracker.off = False
            tracker.see(out)
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return trackers


def test_the_tracker_sees_what_is_alive_and_no_more():
    kept = torch.zeros(10)
    with Tracker() as t:
        a = torch.ones(100)  # 400 bytes
        assert t.bytes == 400
        b = (a * 2).view(50, 2)[:3]  # a view keeps the whole storage
        del a
        kept[:3] = b[:, 0]
        assert (t.bytes, t.peak) == (400, 800)
        del b
        assert t.bytes == 0


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
def test_at_real_widths(fused, name, n_layers, phase, b_e):
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
    with torch.inference_mode(), Tracker() as tracker:
        for task in graph:
            if task.id.op in LANE:
                p.kernels[task.id.op](p, task, 0, bound)
    assert tracker.bytes == 0, "kept beyond the step"
    assert tracker.peak <= own(ledger)
    # Nor is the ledger far from the truth: its lines add up what is not alive at one time.
    assert tracker.peak > 0.5 * own(ledger)


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
def measured(monkeypatch, fused):
    """Buffers and trackers of a run, by phase."""
    seen = SimpleNamespace(buffers=defaultdict(list), trackers=defaultdict(Tracker))

    class Seen(Buffers):
        def __init__(self, graph, *args, **kwargs):
            super().__init__(graph, *args, **kwargs)
            seen.buffers[graph.phase].append(self)

    def tracked(kernel):
        def run(p, task, index, step):
            tracker = seen.trackers[p.phase]
            if tracker not in fused:
                fused.append(tracker)
            with tracker:
                kernel(p, task, index, step)

        return run

    monkeypatch.setattr(program, "Buffers", Seen)
    kernels = KERNELS | {op: tracked(KERNELS[op]) for op in LANE}
    monkeypatch.setattr(program, "KERNELS", kernels)
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
        tracker = measured.trackers[phase]
        assert 0 < tracker.peak <= own(ledger)
        held = lines_of(memory(model, engine.prepared.capacities, decode, work).host)
        assert store.nbytes <= held["KV store"]
        packed = sum(b.nbytes for b in (*engine.weights.dense, engine.weights.head))
        packed += sum(b.nbytes for b in engine.weights.experts if b is not None)
        said = lines_of(ledger.host)
        assert packed <= said["weights"] + said.get("weights as packed", 0)


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


def test_constants_of_the_decode_kernel():
    pytest.importorskip("triton")
    from moegen.exec.kernels import triton_attention as kernel

    assert kernel._TARGET_PROGRAMS == working.SPLIT_PROGRAMS
    assert kernel._MAX_SPLIT_TOKENS == working.SPLIT_TOKENS
    assert kernel._HEAD_TILE == working.HEAD_TILE


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

# Beside what is counted: the matrix libraries' workspaces, and 512 bytes at most a tensor.
SLACK_BYTES = 96 << 20
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
            torch.cuda.reset_peak_memory_stats()
            method(self, *args)
            torch.cuda.synchronize()
            peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated() - before)

        return run

    gc.collect()
    before = torch.cuda.memory_allocated()
    with Engine.random(spec, plan, device="cuda") as engine:
        for phase in ("prefill", "decode"):
            method = getattr(Generation, f"_{phase}")
            monkeypatch.setattr(Generation, f"_{phase}", measuring(phase, method))
        prompts = [[(7 * i + k) % 1000 + 3 for k in range(512 - i)] for i in range(96)]
        engine.generate(prompts, [4 + i % 5 for i in range(96)], ignore_eos=True)
        work = Workload.from_lengths([512 - i for i in range(96)], [4 + i % 5 for i in range(96)])
        for phase, s in (("prefill", plan.prefill), ("decode", plan.decode)):
            hw = engine.prepared.capacities
            said = memory(engine.model, hw, s, work, phase=phase).gpu.total_bytes
            print(
                f"{family} omega {omega} {phase}: {peaks[phase] / 2**20:.0f} MiB held, "
                f"{said / 2**20:.0f} MiB said"
            )
            assert peaks[phase] <= said + SLACK_BYTES
            assert peaks[phase] > 0.6 * said
