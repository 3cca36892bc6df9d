"""Timing never matters: results are the same bit by bit, and every needed edge is why.

Tokens and the whole KV store are compared between a run without delays and runs in which
tasks are held back at random. Then each class of edge is taken out in turn.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from delays import Held, RandomDelays  # noqa: E402
from tiny import tiny_deepseek_v2, tiny_mixtral  # noqa: E402

from moegen.errors import DeadlockError, GraphError, InvalidInput  # noqa: E402
from moegen.exec import generate, issue, program  # noqa: E402
from moegen.exec.arena import Arena, ArenaFull  # noqa: E402
from moegen.exec.buffers import Buffers  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.generate import Generation, SequenceState  # noqa: E402
from moegen.exec.kv import KVStore  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.model import ModelSpec  # noqa: E402
from moegen.graph.passes import buffer_edges  # noqa: E402
from moegen.graph.strategy import Plan, Strategy  # noqa: E402
from moegen.graph.task import EdgeKind  # noqa: E402

SEEDS = {"cpu": 200, "cuda": 50}
CHUNKS = 10
PROMPTS = ([5, 9, 70], [11], [3, 8, 100, 42, 17, 60, 9])
# Rows end at different steps, and the last one is alone behind a barrier.
NEW_TOKENS = (4, 6, 3)
# Long against anything that a busy machine lets a lane wait.
HOLD_S = 0.25
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
ALL = 64
LAST_LAYER = 2

FAMILIES = {
    "mixtral": (tiny_mixtral, {"num_local_experts": 4}),
    "deepseek_v2": (
        tiny_deepseek_v2,
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3},
    ),
}


def _tiny(family, path):
    make, over = FAMILIES[family]
    return make(path, **over)[0]


def plan_of(spec, *, slots=1, resident=0.0, **fields):
    """A plan for three rows; ``slots`` counts expert groups, ``resident`` is a share."""
    s = Strategy(**{"B": 3, "b_a": 1, "b_e": 3} | fields)
    s = s.with_(
        s_expert=slots * s.expert_group * spec.expert_bytes,
        s_params=int(resident * (spec.weight_bytes - spec.head_bytes)),
    )
    # Two waves: prefill has a step before as well.
    return Plan(prefill=s.with_(B=2, omega=0.0, fetch="all"), decode=s)


STRATEGIES = (
    {"omega": 0.5, "kv_slots": 1},
    {"omega": 0.0, "kv_slots": 2, "slots": 2, "dense_slots": 1},
    {"omega": 0.5, "b_a": 2, "slots": 2, "fetch": "routed"},
    {"omega": 1.0, "dense_slots": 1, "expert_group": 3},
    {"omega": 0.2, "kv_slots": 3, "slots": ALL, "dense_slots": 3, "resident": 0.4},
)


class Bench:
    """An engine whose runs are looked at from the inside."""

    def __init__(self, engine):
        self.engine = engine
        self.plain = {}

    @property
    def seeds(self):
        return SEEDS[self.engine.device.type]

    def run(self, fields, delays=None):
        """Tokens and KV store of a run, every buffer poisoned before it."""
        machinery = self.engine.machinery
        plan = plan_of(self.engine.model, **fields)
        rows = [
            SequenceState(i, list(p), n)
            for i, (p, n) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True))
        ]
        pin = self.engine.device.type == "cuda"
        tokens = sum(row.room for row in rows)
        store = KVStore(self.engine.model, tokens, machinery.family.dtype, pin=pin)
        try:
            for layer in store.layers:
                layer.zero_()
            Generation(machinery, plan, frozenset(), delays=delays).run(rows, store)
            return [row.out for row in rows], [layer.clone() for layer in store.layers]
        finally:
            store.close()

    def expected(self, fields):
        """The same without delays, once."""
        key = repr(fields)
        if key not in self.plain:
            self.plain[key] = self.run(fields)
        return self.plain[key]


def same(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


class PoisonedBuffers(Buffers):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.poison()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(program, "Buffers", PoisonedBuffers)
    monkeypatch.setattr(Arena, "poison", True)  # what a frame held, once it has ended


def _bench(family, device, path):
    engine = Engine.from_pretrained(_tiny(family, path), device=device, dtype="float32")
    return Bench(engine)


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request, device, tmp_path_factory):
    b = _bench(request.param, device, tmp_path_factory.mktemp("tiny"))
    yield b
    b.engine.close()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_delays_leave_no_trace(bench, chunk):
    for seed in range(chunk, bench.seeds, CHUNKS):
        fields = STRATEGIES[seed // CHUNKS % len(STRATEGIES)]
        got, wanted = bench.run(fields, RandomDelays(seed)), bench.expected(fields)
        assert got[0] == wanted[0], f"seed {seed}, {fields}"
        for layer, (x, y) in enumerate(zip(got[1], wanted[1], strict=True)):
            assert torch.equal(x, y), f"seed {seed}, {fields}: KV of layer {layer}"


def test_delays_are_mostly_none_and_sometimes_long():
    model = ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=2)
    tasks = build(model, Strategy(B=4, b_a=2, b_e=8, omega=0.5), kv_len=8).tasks

    def drawn(seed):
        d = RandomDelays(seed)
        return [f(t, i) for f in (d.issue_s, d.run_s) for t in tasks for i in range(8)]

    assert drawn(7) == drawn(7) != drawn(9)
    assert 0.01 < sum(x > 0 for x in drawn(7)) / len(drawn(7)) < 0.1
    assert max(drawn(7)) > 2e-3
    slow = {RandomDelays(seed).slow for seed in range(0, 200, 2)}
    assert len(slow) == 10  # each lane, on either side


# Edges that protect a slot. One class at a time is taken out; a task that still uses the slot
# is held back, so that whoever overwrites it comes first.

# (phase, buffer) -> settings in which the class is needed, and the op and layer to hold back.
NEEDED = {
    ("decode", "rows"): ({"omega": 0.0}, "append_kv", LAST_LAYER),
    ("decode", "kv"): ({"omega": 0.0, "kv_slots": 1}, "attn_gpu", 0),
    ("decode", "expert_weights"): ({"omega": 0.5, "slots": 1}, "expert", 1),
    # Routed experts wait for the routing, so the next layer's dense weights come at once and
    # none after them; with all experts fetched the slot may hold the right ones by chance.
    ("decode", "dense_weights"): ({"fetch": "routed", "dense_slots": 1}, "pre_attn", 0),
    ("prefill", "rows"): ({}, "append_kv", LAST_LAYER),
    ("prefill", "qkv"): ({}, "append_kv", 0),
    ("prefill", "expert_weights"): ({"slots": 2}, "expert", 1),
    ("prefill", "dense_weights"): ({"slots": ALL, "dense_slots": 2}, "pre_attn", 0),
}
# The rest follow from other edges. Queries and outputs of the CPU's rows, counts and tokens
# go round with the chain of the layers itself: whoever writes the next value has waited for
# it. In decode a layer's qkv is read before the KV lane goes on to the next layer's history.
IMPLIED = {
    "decode": {
        "attn_out", "counts", "host_attn", "host_counts", "host_qkv", "logits", "qkv", "tokens",
    },
    "prefill": {"counts", "host_counts", "logits", "tokens"},
}  # fmt: skip


def graphs_of(spec):
    """Graphs of both phases in many settings, those of the tests above among them."""
    settings = [
        *STRATEGIES,
        *(fields for fields, _, _ in NEEDED.values()),
        {"omega": 0.5, "fetch": "routed", "slots": 3, "b_a": 3},
        {"omega": 0.5, "resident": 1.0},
        {"omega": 1.0, "slots": ALL, "dense_slots": 1, "expert_group": 2},
        {"omega": 0.0, "slots": ALL, "dense_slots": 3, "kv_slots": 3, "b_a": 3},
    ]
    for fields in settings:
        plan = plan_of(spec, **fields)
        yield build(spec, plan.decode, "decode", lengths=[3, 1, 7])
        yield build(spec, plan.prefill, "prefill", lengths=[3, 1])


@pytest.mark.cpu
def test_every_class_of_buffer_edge_is_needed_or_listed_as_implied(tmp_path):
    found = {}
    for family in FAMILIES:
        spec = ModelSpec.from_pretrained(_tiny(family, tmp_path / family))
        for g in graphs_of(spec):
            for buffer, needed in buffer_edges(g, 2).items():
                key = g.phase, buffer
                found[key] = found.get(key, False) or needed
    assert {key for key, needed in found.items() if needed} == NEEDED.keys()
    implied = {(phase, buffer) for phase, names in IMPLIED.items() for buffer in names}
    assert {key for key, needed in found.items() if not needed} == implied


@pytest.fixture
def without(monkeypatch):
    """Take a class of edges out of every graph of a phase; back to the whole with None."""

    def take(phase=None, kind=None, buffer=None):
        def cut(model, s, at, **kwargs):
            g = build(model, s, at, **kwargs)
            return g.without(kind, buffer) if at == phase else g

        monkeypatch.setattr(generate, "build", cut)

    return take


@pytest.mark.parametrize("key", NEEDED, ids="-".join)
def test_without_a_needed_buffer_edge_results_differ(bench, without, key):
    (phase, buffer), (fields, op, layer) = key, NEEDED[key]
    plan = plan_of(bench.engine.model, **fields)
    s, lengths = (plan.decode, [3, 1, 7]) if phase == "decode" else (plan.prefill, [3, 1])
    assert buffer_edges(build(bench.engine.model, s, phase, lengths=lengths))[buffer]
    held = Held(op, layer, HOLD_S)
    assert same(bench.run(fields, held), bench.expected(fields))
    without(phase, EdgeKind.BUFFER, buffer)
    assert not same(bench.run(fields, held), bench.expected(fields))


# Edges that carry an input from lane to lane, and the op that writes it.
INPUTS = {
    "rows": "copy_rows",
    "dense_weights": "copy_dense",
    "qkv": "pre_attn",
    "host_qkv": "send_qkv",
    "host_attn": "attn_cpu",
    "attn_out": "recv_attn",
    "kv": "fetch_kv",
    "counts": "route",
    "host_counts": "copy_counts",
    "expert_weights": "copy_expert",
    "tokens": "sample",
    "host_tokens": "copy_tokens",
}
# Sampling stands behind the logits in its lane, and who takes the tokens takes them too.
IMPLIED_INPUTS = {"logits"}
# Slots for everything: no BUFFER edge stands in for an input's. One tile an expert, however
# many tokens a count that nobody wrote may claim.
ROOMY = {"omega": 0.5, "slots": ALL, "dense_slots": ALL, "kv_slots": ALL, "b_e": 2**62}


@pytest.mark.cpu
def test_every_class_of_input_between_lanes_is_listed(tmp_path):
    for family in FAMILIES:
        spec = ModelSpec.from_pretrained(_tiny(family, tmp_path / family))
        g = build(spec, plan_of(spec, **ROOMY).decode, "decode", lengths=[3, 1, 7])
        across = {
            e.reason.buffer
            for e in g.edges
            if e.reason.kind is EdgeKind.DATA
            and (g[e.src].lane is not g[e.dst].lane or e.reason.host)
        }
        assert across == INPUTS.keys() | IMPLIED_INPUTS


# What becomes of an index, a count or a size that nobody wrote, and of a step that nobody bound.
FAILURES = (
    IndexError, KeyError, RuntimeError, DeadlockError, GraphError, InvalidInput, ArenaFull,
)  # fmt: skip


# On CPU lanes alone: there an index read from an unwritten table raises, on CUDA it would end
# the process's use of the device.
@pytest.mark.parametrize("device", DEVICES[:1], indirect=True)
@pytest.mark.parametrize("buffer", INPUTS)
def test_without_an_input_a_run_differs_or_fails(bench, without, monkeypatch, buffer):
    g = build(bench.engine.model, plan_of(bench.engine.model, **ROOMY).decode, lengths=[3, 1, 7])
    assert len(g.without(EdgeKind.DATA, buffer).edges) < len(g.edges)
    held = Held(INPUTS[buffer], 1, HOLD_S)
    wanted = bench.expected(ROOMY)
    assert same(bench.run(ROOMY, held), wanted)
    without("decode", EdgeKind.DATA, buffer)
    if buffer == "host_tokens":
        monkeypatch.setattr(issue, "STALL_S", 1.0)  # nobody binds the next step
    try:
        got = bench.run(ROOMY, held)
    except FAILURES:
        return
    assert not same(got, wanted)
