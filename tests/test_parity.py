"""Parity with transformers: every step's logits and the greedy tokens, whatever the strategy."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import distinct_features, steer, tiny_deepseek_v2, tiny_mixtral  # noqa: E402

from moegen.exec.engine import Engine  # noqa: E402
from moegen.graph.strategy import Plan, Strategy  # noqa: E402

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
FAMILIES = {"mixtral": tiny_mixtral, "deepseek_v2": tiny_deepseek_v2}
LENGTHS = (33, 1, 64, 5)
NEW_TOKENS = 48
LOGIT_TOLERANCE = 1e-4
# Below this gap between its two best tokens, a reference step decides nothing.
DECIDED = 1e-3
ALL = 10**6


def draw_prompts(lengths, vocab=128, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=g).tolist() for n in lengths]


@dataclass
class Reference:
    """What transformers generates: token ids and logits [steps, V] of each prompt."""

    prompts: list
    ids: list
    logits: list

    @classmethod
    def of(cls, hf, prompts, new_tokens):
        ids, logits = [], []
        with torch.inference_mode():
            for p in prompts:
                out = hf.generate(
                    torch.tensor([p]),
                    attention_mask=torch.ones(1, len(p), dtype=torch.long),
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                    eos_token_id=None,
                    pad_token_id=0,
                )
                ids.append(out.sequences[0, len(p) :].tolist())
                logits.append(torch.cat(out.logits).float())
        return cls(prompts, ids, logits)


def assert_parity(completions, ref):
    """Logits of each step up to the first undecided one, and the tokens before it.

    Up to there both sides have been fed the same tokens. Most steps must have been compared.
    """
    compared = total = 0
    for done, ids, logits in zip(completions, ref.ids, ref.logits, strict=True):
        assert done.logits.shape == logits.shape and len(done.token_ids) == len(ids)
        best = logits.topk(2).values
        undecided = (best[:, 0] - best[:, 1] < DECIDED).nonzero()
        n = int(undecided[0]) if len(undecided) else len(ids)
        assert done.token_ids[:n] == ids[:n], f"prompt {done.index}"
        error = (done.logits.float() - logits)[: n + 1].abs().max()
        assert error <= LOGIT_TOLERANCE, f"prompt {done.index}: logits differ by {error:.1e}"
        compared += n
        total += len(ids)
    assert compared > 0.8 * total, f"only {compared} of {total} tokens could be compared"


def pairwise(factors, seed=0):
    """Settings such that any two factors meet in every combination of their values, greedily."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }

    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    rows = []
    while missing:
        best = None
        for _ in range(60):
            a, x, b, y = rng.choice(sorted(missing, key=repr))
            row = {n: rng.choice(factors[n]) for n in names} | {a: x, b: y}
            for n in rng.sample(names, len(names)):
                if n not in (a, b):
                    tries = [row | {n: v} for v in factors[n]]
                    row = max(tries, key=lambda r: len(pairs(r) & missing))
            gain = len(pairs(row) & missing)
            if best is None or gain > best[0]:
                best = gain, row
        assert best is not None
        rows.append(best[1])
        missing -= pairs(best[1])
    return rows


FACTORS = {
    "omega": (0.0, 0.5, 1.0),
    "b_a": (1, 3, 4),
    "b_e": (1, 7, ALL),
    "expert_slots": (1, 3, ALL),
    "dense_slots": (1, 2, 3),
    "kv_slots": (1, 2, 3),
    "expert_group": (1, 3, 8),
    "resident": (0.0, 0.4, 1.0),
    "fetch": ("all", "routed"),
    "B": (2, 3, 4),
    "wave": (1, 2, 4),
}
SETTINGS = pairwise(FACTORS)


def plan_of(spec, setting):
    """A plan from a setting; slots and residency in units that suit any model."""
    c = dict(setting)
    slots, share, wave = c.pop("expert_slots"), c.pop("resident"), c.pop("wave")
    group = c["expert_group"] * spec.expert_bytes
    everything = spec.weight_bytes - spec.head_bytes
    s = Strategy(**c, s_expert=min(slots * group, 4 * everything), s_params=int(share * everything))
    # Prefill gets the same residency, as a run's plan has, and its own wave and micro-batch.
    return Plan(prefill=s.with_(B=wave, omega=0.0, fetch="all"), decode=s)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    path, hf = FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
    return path, Reference.of(hf, draw_prompts(LENGTHS), NEW_TOKENS)


@pytest.fixture(scope="module", params=DEVICES)
def engine(request, tiny):
    path, ref = tiny
    with Engine.from_pretrained(path, device=request.param, dtype="float32") as e:
        yield e, ref


def test_settings_cover_every_pair():
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(row[a], row[b]) for row in SETTINGS}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b])), (a, b)
    assert len(SETTINGS) <= 20  # and it is far from the product of all


def name_of(setting):
    return "-".join(str(v) for v in setting.values()).replace(str(ALL), "all")


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_every_step_is_that_of_transformers(engine, setting):
    loaded, ref = engine
    plan = plan_of(loaded.model, setting)
    e = Engine(loaded.prepared.with_plan(plan), loaded.weights)
    try:
        done = e.generate(ref.prompts, NEW_TOKENS, ignore_eos=True, return_logits=True)
    finally:
        e.machinery.decode.close()  # the weights are the other engine's
    assert_parity(done, ref)
    # It ran as it was told to.
    assert e.plan == Plan(plan.prefill.with_(B=min(setting["wave"], setting["B"])), plan.decode)


@pytest.mark.cpu
def test_parity_can_fail(tiny):
    path, ref = tiny
    with Engine.from_pretrained(path, Strategy(B=4, b_a=2, b_e=7), device="cpu") as e:
        done = e.generate(ref.prompts, 8, ignore_eos=True, return_logits=True)
    short = Reference(ref.prompts, [x[:8] for x in ref.ids], [x[:8] for x in ref.logits])
    assert_parity(done, short)
    done[2].token_ids[6] += 1
    with pytest.raises(AssertionError, match="prompt 2"):
        assert_parity(done, short)
    done[2].token_ids[6] -= 1
    done[1].logits[5, 17] += 2e-4
    with pytest.raises(AssertionError, match="prompt 1: logits differ by 2"):
        assert_parity(done, short)
    tied = [x.clone() for x in short.logits]
    for x, d in zip(tied, done, strict=True):
        x[0] = x[0].max()
        d.logits[0] = x[0]
    with pytest.raises(AssertionError, match="only 0 of 32"):
        assert_parity(done, Reference(ref.prompts, short.ids, tied))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layout", "sharded", "tied"),
    [("hub", True, True), ("fused", True, False), ("fused", False, True)],
)
def test_layouts_of_checkpoints(device, family, layout, sharded, tied, tmp_path):
    path, hf = FAMILIES[family](tmp_path, layout=layout, sharded=sharded, tie_word_embeddings=tied)
    ref = Reference.of(hf, draw_prompts((3, 17)), 8)
    with Engine.from_pretrained(
        path, Strategy(B=2, b_a=1, b_e=7, omega=0.5), device=device, dtype="float32"
    ) as e:
        assert_parity(e.generate(ref.prompts, 8, ignore_eos=True, return_logits=True), ref)


FAVOURITE, SHUNNED = 5, 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fetch", ["all", "routed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_takes_every_token_and_one_none(device, family, fetch, tmp_path):
    path, hf = FAMILIES[family](tmp_path)
    features = distinct_features(128)
    features[:, FAVOURITE], features[:, SHUNNED] = 3.0, -3.0
    steer(hf, features)
    hf.save_pretrained(path, save_original_format=True)
    ref = Reference.of(hf, draw_prompts((1, 5, 33)), 12)
    s = Strategy(B=3, b_a=2, b_e=7, omega=0.5, fetch=fetch, expert_group=3)
    with Engine.from_pretrained(path, s, device=device, dtype="float32") as e:
        assert_parity(e.generate(ref.prompts, 12, ignore_eos=True, return_logits=True), ref)
        steps = [s for t in e.timelines for s in t.meta["shapes"]]
    assert len(steps) > 8
    for shape in steps:
        tokens = sum(new * rows for new, rows in shape["new"])
        for counts in shape["expert_tokens"].values():
            assert counts[FAVOURITE] == tokens and counts[SHUNNED] == 0


# bfloat16: how far from float32, against how far transformers itself is.

FORCED = 32
BF16_LENGTHS = (5, 40, 1, 23)
WIDE = {
    "cpu": {"hidden_size": 128, "vocab_size": 512, "initializer_range": 0.1},
    "cuda": {"hidden_size": 512, "vocab_size": 2048, "initializer_range": 0.05},
}
WIDE_MIXTRAL = {
    "cpu": {"intermediate_size": 192},
    "cuda": {"intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64},
}
WIDE_DEEPSEEK = {
    "cpu": {"intermediate_size": 256, "moe_intermediate_size": 96},
    "cuda": {"intermediate_size": 1024, "moe_intermediate_size": 512, "kv_lora_rank": 128},
}


def forced_logits(hf, prompts, forced, device):
    """transformers' logits [rows, FORCED, V] when it is fed ``forced``."""
    hf = hf.to(device).eval()
    rows = []
    with torch.inference_mode():
        for p, f in zip(prompts, forced, strict=True):
            out = hf(torch.tensor([p + f[:-1]], device=device)).logits[0]
            rows.append(out[-FORCED:].float().cpu())
    return torch.stack(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers(device, family, tmp_path):
    own = WIDE_MIXTRAL if family == "mixtral" else WIDE_DEEPSEEK
    over = WIDE[device] | own[device]
    _, made = FAMILIES[family](tmp_path / "float32", **over)
    path = tmp_path / "bfloat16"
    # A router near a tie chooses by rounding, and one other choice outweighs all other errors.
    steer(made, distinct_features(over["vocab_size"]))
    made.to(torch.bfloat16).save_pretrained(path, save_original_format=True)
    vocab = over["vocab_size"]
    prompts = draw_prompts(BF16_LENGTHS, vocab)
    forced = draw_prompts([FORCED] * len(prompts), vocab, seed=2)

    def theirs(dtype):
        # Loaded, not cast: casting would round the rotary frequencies as well.
        hf = type(made).from_pretrained(path, dtype=dtype)
        return forced_logits(hf, prompts, forced, device)

    exact, rounded = theirs(torch.float32), theirs(torch.bfloat16)
    s = Strategy(B=4, b_a=2, b_e=7, omega=0.5)
    with Engine.from_pretrained(path, s, device=device) as e:
        assert e.model.dtype == "bfloat16"
        done = e.generate(prompts, FORCED, forced=forced, ignore_eos=True, return_logits=True)
    assert [d.token_ids for d in done] == forced
    ours = torch.stack([d.logits.float() for d in done])

    def rms(x):
        return float(x.pow(2).mean().sqrt())

    error, allowed = ours - exact, rounded - exact
    most = float(allowed.abs().max())
    assert rms(error) <= 1.5 * rms(allowed), (rms(error), rms(allowed))
    assert float(error.abs().max()) <= 1.5 * most, (float(error.abs().max()), most)
    best = exact.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 4 * most
    assert int(clear.sum()) > 10, f"only {int(clear.sum())} steps have a clear winner"
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])
