"""The families' mathematics, op by op in a plain loop, against transformers."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import tiny_deepseek_v2, tiny_mixtral  # noqa: E402

from moegen.errors import InvalidInput  # noqa: E402
from moegen.exec.arena import Arena  # noqa: E402
from moegen.exec.attention import CpuDecode  # noqa: E402
from moegen.exec.decode_attention import cpu_decode  # noqa: E402
from moegen.exec.families import family_for  # noqa: E402
from moegen.exec.families.base import Family  # noqa: E402
from moegen.exec.weights import HostWeights  # noqa: E402
from moegen.graph.model import ModelSpec  # noqa: E402

PROMPTS, STEPS = (1, 5, 33), 8

YARN_MIXTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "mixtral": (tiny_mixtral, {}),
    "mixtral-mha": (tiny_mixtral, {"num_key_value_heads": 8, "num_experts_per_tok": 3}),
    "mixtral-tied": (tiny_mixtral, {"tie_word_embeddings": True}),
    "mixtral-window": (tiny_mixtral, {"sliding_window": 7}),
    "mixtral-yarn": (tiny_mixtral, {"rope_parameters": YARN_MIXTRAL}),
    "mixtral-eps": (tiny_mixtral, {"rms_norm_eps": 0.1}),
    "deepseek": (tiny_deepseek_v2, {}),
    "deepseek-q-lora": (tiny_deepseek_v2, {"q_lora_rank": 24}),
    "deepseek-greedy": (tiny_deepseek_v2, {"topk_method": "greedy"}),
    "deepseek-eps": (tiny_deepseek_v2, {"rms_norm_eps": 0.1, "q_lora_rank": 24}),
    "deepseek-bias": (tiny_deepseek_v2, {"attention_bias": True, "q_lora_rank": 24}),
    "deepseek-plain-rope": (
        tiny_deepseek_v2,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "deepseek-tied": (tiny_deepseek_v2, {"tie_word_embeddings": True, "v_head_dim": 24}),
}


def filled(shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype)


def moe(family: Family, store: HostWeights, layer: int, x, h):
    """The MLP of a layer, as the graph's ops do it: tokens sorted by expert, then combined."""
    w, spec, ops = store.dense_views(layer), family.spec.layers[layer], family.ops
    arena, hidden = Arena(1 << 22, x.device), x.shape[1]
    if spec.mlp == "dense":
        family.dense_mlp(w, h, h, arena)
        return x.add_(h)
    k, n = spec.top_k, len(x)
    ids, inverse = torch.empty(2, n, k, dtype=torch.int32)
    weights = torch.empty(n, k)
    family.route(w, h, ids, weights, arena)
    order, ends = torch.empty(n * k, dtype=torch.int32), torch.empty(spec.n_experts).int()
    counts = torch.empty(spec.n_experts, dtype=torch.int64)
    ops.sort_choices(ids, spec.n_experts, order, inverse, ends, counts, arena)
    y, start = filled((n * k, hidden), h.dtype), 0
    for e, end in enumerate(ends.tolist()):
        mine = slice(start, end)
        with arena.frame():
            family.expert(store.expert_views(layer, e), h[order[mine]], y[mine], arena)
        start = end
    shared = None
    if "shared_down" in w:
        shared = filled((n, hidden), h.dtype)
        family.shared_expert(w, h, shared, arena)
    ops.combine(x, y, inverse, weights, shared, arena)
    return x


def decode(family: Family, layer: int, q, new, rows, attend: CpuDecode):
    """Attention of one new token a row, over rows that lie in one store behind each other."""
    lengths = [len(row) for row in rows]
    store = torch.cat([*rows, new.new_full((1, new.shape[1]), torch.nan)])
    start = np.cumsum([0, *lengths])[:-1]
    store[start + lengths - 1] = torch.nan  # the kernel's to write
    out = q.new_empty(len(rows), family.spec.layers[layer].attention.out_width("decode"))
    shape = family.decode_shape(layer)
    attend.attend(shape, q, new, store, start, np.array(lengths), out)
    return out


def step(family: Family, store: HostWeights, ids, pos, kv, lengths, phase, attend):
    """One step over packed rows; ``kv[layer][row]`` is what each row has stored so far."""
    n, dtype = len(ids), family.dtype
    x = filled((n, family.spec.hidden), dtype)
    family.embed(store.head_views(), torch.tensor(ids, dtype=torch.int64), x)
    cos, sin = torch.empty(2, n, len(family.rope.inv_freq))
    family.angles(torch.tensor(pos), cos, sin)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    for i, layer in enumerate(family.spec.layers):
        w, arena = store.dense_views(i), Arena(1 << 22, x.device)
        q = filled((n, layer.attention.q_width(phase)), dtype)
        new = filled((n, layer.attention.kv_width), dtype)
        family.pre_attn(w, x, cos, sin, phase, q, new, arena)
        rows = new.split(lengths)
        kv[i] = [torch.cat(pair) for pair in zip(kv[i], rows, strict=True)] if kv[i] else [*rows]
        if phase == "prefill":
            o = filled((n, layer.attention.out_width(phase)), dtype)
            family.attn_prefill(w, q, new, lengths, ends, o, arena)
        else:
            o = decode(family, i, q, new, kv[i], attend)
        h = filled(x.shape, dtype)
        family.post_attn(w, o, x, h, phase, arena)
        x = moe(family, store, i, x, h)
    out = filled((len(lengths), family.spec.vocab), dtype)
    family.logits(store.head_views(), x[ends[1:].long() - 1], out)
    return out


def run(family, store, prompts, steps, attend, follow=None):
    """Logits [steps + 1, R, vocab] of greedy decoding, or of the tokens in ``follow``."""
    texts = [list(p) for p in prompts]
    kv = [[] for _ in family.spec.layers]
    lengths = [len(p) for p in texts]
    ids, pos = sum(texts, []), [i for n in lengths for i in range(n)]
    out = [step(family, store, ids, pos, kv, lengths, "prefill", attend)]
    for t in range(steps):
        new = out[-1].argmax(-1).tolist() if follow is None else [row[t] for row in follow]
        for text, token in zip(texts, new, strict=True):
            text.append(token)
        pos = [len(text) - 1 for text in texts]
        out.append(step(family, store, new, pos, kv, [1] * len(texts), "decode", attend))
    return torch.stack(out), [text[n:] for text, n in zip(texts, lengths, strict=True)]


def reference(model, prompts, follow):
    """transformers' logits [steps + 1, R, vocab] for prompts followed by given tokens."""
    rows = []
    for p, f in zip(prompts, follow, strict=True):
        logits = model(torch.tensor([list(p) + list(f)])).logits[0]
        rows.append(logits[len(p) - 1 :])
    return torch.stack(rows, dim=1)


def make_prompts(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=g).tolist() for n in PROMPTS]


@pytest.mark.parametrize("kind", [None, "torch"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers(name, kind, tmp_path):
    make, over = CASES[name]
    path, model = make(tmp_path, seed=1, **over)
    spec = ModelSpec.from_pretrained(path)
    family = family_for(spec)
    with closing(cpu_decode(2, kind)) as attend:
        store = HostWeights.load(path, spec, family)
        prompts = make_prompts()
        got, tokens = run(family, store, prompts, STEPS, attend)
    wanted = reference(model, prompts, tokens)
    assert wanted.abs().max() > 1  # logits with something to get wrong
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("make", [tiny_mixtral, tiny_deepseek_v2])
@torch.no_grad()
def test_bfloat16_is_no_worse_than_transformers_own(make, tmp_path):
    path, model = make(tmp_path, seed=2, num_experts_per_tok=8, topk_group=4, n_group=4)
    spec = ModelSpec.from_pretrained(path)
    prompts = make_prompts()
    family = family_for(spec)
    attend = cpu_decode(1)
    exact, tokens = run(family, HostWeights.load(path, spec, family), prompts, STEPS, attend)
    half = family_for(spec, torch.bfloat16)
    store = HostWeights.load(path, spec, half)
    got, _ = run(half, store, prompts, STEPS, attend, follow=tokens)
    attend.close()
    assert got.dtype == torch.bfloat16
    # from_pretrained, not .bfloat16(): it keeps in float32 what must stay so.
    theirs = reference(type(model).from_pretrained(path, dtype=torch.bfloat16), prompts, tokens)
    ours, own = ((t.float() - exact).pow(2).mean().sqrt().item() for t in (got, theirs))
    assert ours <= 1.5 * own


def test_router_of_deepseek_stays_float32(tmp_path):
    path, _ = tiny_deepseek_v2(tmp_path)
    spec = ModelSpec.from_pretrained(path)
    views = HostWeights.load(path, spec, family_for(spec, torch.bfloat16)).dense_views(1)
    assert views["router"].dtype == torch.float32
    assert {t.dtype for name, t in views.items() if name != "router"} == {torch.bfloat16}


@pytest.mark.parametrize("make", [tiny_mixtral, tiny_deepseek_v2])
@torch.no_grad()
def test_every_op_takes_no_tokens(make, tmp_path):
    path, _ = make(tmp_path)
    spec = ModelSpec.from_pretrained(path)
    family = family_for(spec)
    store = HostWeights.load(path, spec, family)
    with closing(cpu_decode(1)) as attend:
        for phase in ("prefill", "decode"):
            out = step(family, store, [], [], [[] for _ in spec.layers], [], phase, attend)
            assert out.shape == (0, spec.vocab)


@pytest.mark.parametrize(
    ("name", "over", "says"),
    [
        ("qwen3-30b-a3b", {}, "mixtral, deepseek_v2"),
        ("mixtral-8x7b", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("mixtral-8x7b", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'"),
        ("mixtral-8x7b", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek-v2", {"n_group": 7}, "n_group"),
    ],
)
def test_what_cannot_run_is_refused_by_name(name, over, says):
    spec = ModelSpec.from_pretrained(name)
    spec = ModelSpec.from_config(spec.hf | over, name=name)
    with pytest.raises(InvalidInput, match=says):
        family_for(spec)


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "mixtral-8x22b", "deepseek-v2", "deepseek-v2-lite"]
)
def test_layouts_have_every_parameter_of_the_spec(name):
    spec = ModelSpec.from_pretrained(name)
    family = family_for(spec)

    def count(shapes):
        return sum(torch.Size(s).numel() for s in shapes.values())

    total = count(family.head_layout())
    for i, layer in enumerate(spec.layers):
        total += count(family.dense_layout(i)) + layer.n_experts * count(family.expert_layout(i))
    assert total == spec.n_params
