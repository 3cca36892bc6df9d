"""Configurations beyond the catalogue: other sizes of its families, other spellings, refusals."""

from __future__ import annotations

import json
import random

import pytest

from moegen.errors import InvalidInput
from moegen.graph.hf_files import CATALOGUE
from moegen.graph.model import ModelSpec


def config(name: str, **changes: object) -> dict:
    return json.loads((CATALOGUE / f"{name}.json").read_text()) | changes


GLM_45 = config(
    "glm-4.5-air", hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
    num_hidden_layers=92, first_k_dense_replace=3, n_routed_experts=160, use_qk_norm=True,
    routed_scaling_factor=2.5,
)  # fmt: skip
QWEN3_CODER_480B = config(
    "qwen3-30b-a3b", hidden_size=6144, intermediate_size=8192, moe_intermediate_size=2560,
    num_hidden_layers=62, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
    num_experts=160, num_experts_per_tok=8, shared_expert_intermediate_size=0,
    mlp_only_layers=[], rope_theta=10000000, max_position_embeddings=262144,
)  # fmt: skip
MOONLIGHT = config(
    "deepseek-r1", hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408,
    num_hidden_layers=27, first_k_dense_replace=1, num_attention_heads=16, num_key_value_heads=16,
    q_lora_rank=None, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
    n_group=1, topk_group=1, vocab_size=163840, quantization_config=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("hf", "billions", "active"),
    [(GLM_45, 353, 32), (QWEN3_CODER_480B, 480, 35), (MOONLIGHT, 16, 3)],
    ids=["glm-4.5", "qwen3-coder-480b-a35b", "moonlight-16b-a3b"],
)
def test_sizes_of_models_beyond_the_catalogue_are_those_in_their_names(hf, billions, active):
    m = ModelSpec.from_config(hf)
    assert round(m.n_params / 1e9) == billions
    used = m.n_params - sum(x.expert_params * (x.n_experts - x.top_k) for x in m.layers)
    assert used / 1e9 == pytest.approx(active, rel=0.06)


def fp8(**more: object) -> dict:
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    return config("qwen3-30b-a3b", quantization_config=quant | more)


def test_modules_that_are_never_quantised_may_be_named():
    layers = range(48)
    names = ["lm_head", "model.embed_tokens", "model.norm"]
    names += [f"model.layers.{i}.{x}" for i in layers for x in ("input_layernorm", "mlp.gate")]
    names += ["model.layers.48.self_attn", "model.layers.48"]  # behind the last
    a, b = ModelSpec.from_config(fp8(modules_to_not_convert=names)), ModelSpec.from_config(fp8())
    assert a.layers == b.layers and a.weight_bytes == b.weight_bytes < 0.55 * 2 * b.n_params


@pytest.mark.parametrize(
    "names",
    [
        ["self_attn"],
        ["model.layers.*.self_attn"],
        [f"model.layers.{i}.self_attn." for i in range(48)],
        [f"layers.{i}.self_attn" for i in range(48)],
    ],
)
def test_modules_left_out_of_fp8_keep_their_size(names):
    x = ModelSpec.from_config(fp8(modules_to_not_convert=names)).layers[0]
    assert x.pre.bytes == 2 * x.pre_params and x.post.bytes == 2 * x.post_params
    assert x.pre.scale_bytes == 0 and x.expert.bytes == x.expert.params
    plain = ModelSpec.from_config(fp8(modules_to_not_convert=["mlp.experts"])).layers[0]
    assert plain.expert.bytes == 2 * plain.expert.params and plain.pre.bytes == plain.pre_params


def test_shared_experts_left_out_of_fp8():
    hf = config("deepseek-r1")
    hf["quantization_config"]["modules_to_not_convert"] = ["model.layers.*.mlp.shared_experts"]
    m = ModelSpec.from_config(hf)
    assert m.layers[3].shared.bytes == 2 * m.layers[3].shared.params
    assert m.layers[0].dense_mlp.bytes == m.layers[0].dense_mlp.params
    hf["quantization_config"]["modules_to_not_convert"] = [
        f"model.layers.{i}.mlp" for i in range(3)
    ]
    m = ModelSpec.from_config(hf)
    assert m.layers[0].dense_mlp.bytes == 2 * m.layers[0].dense_mlp.params
    assert m.layers[3].shared.bytes == m.layers[3].shared.params


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model.layers.0.self_attn"], "leaves out attention in 1 of the 48 layers"),
        (["self_attn.q_proj"], "names 'self_attn.q_proj'"),
        (["re:.*mlp.*"], "names 're:"),
        ("lm_head", "must be a list of names"),
    ],
)
def test_parts_that_cannot_be_told_apart_are_refused(names, said):
    with pytest.raises(InvalidInput, match=f"modules_to_not_convert {said}"):
        ModelSpec.from_config(fp8(modules_to_not_convert=names))


def test_mxfp4_is_of_experts_whatever_else_is_named():
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    quant = {"quant_method": "mxfp4", "modules_to_not_convert": [*names, "lm_head"]}
    m = ModelSpec.from_config(config("gpt-oss-20b", quantization_config=quant))
    assert m.weight_bytes == ModelSpec.from_pretrained("gpt-oss-20b").weight_bytes


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "compressed-tensors", "bitsandbytes", "modelopt", "fbgemm_fp8"]
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_other_quantisations_are_refused_by_name(method, key):
    with pytest.raises(InvalidInput, match=f"quantised by '{method}' are not supported"):
        ModelSpec.from_config(config("mixtral-8x7b", **{key: {"quant_method": method}}))


def test_weights_quantised_for_mlx_are_refused():
    with pytest.raises(InvalidInput, match="are not supported; supported are fp8, mxfp4"):
        ModelSpec.from_config(config("mixtral-8x7b", quantization={"bits": 4, "group_size": 64}))


@pytest.mark.parametrize("family", ["llama4", "jamba", "dbrx", "grok-1", "qwen3_next"])
def test_other_families_are_refused_by_name(family):
    with pytest.raises(InvalidInput, match=f"family '{family}' is not supported.*qwen3_moe"):
        ModelSpec.from_config({"model_type": family})


def test_a_language_model_within_another_is_pointed_to():
    text = config("kimi-k2", model_type="kimi_k2")
    with pytest.raises(InvalidInput, match="'kimi_k25' is not.*is 'kimi_k2'.*text_config alone"):
        ModelSpec.from_config({"model_type": "kimi_k25", "text_config": text})
    assert ModelSpec.from_config(text).n_params == ModelSpec.from_pretrained("kimi-k2").n_params


def test_the_older_name_of_experts_a_token():
    hf = config("gpt-oss-20b")
    hf["experts_per_token"] = hf.pop("num_experts_per_tok")
    assert ModelSpec.from_config(hf).layers[0].top_k == 4


FAMILIES = {
    "mixtral": "mixtral-8x7b",
    "deepseek_v2": "deepseek-v2-lite",
    "deepseek_v3": "deepseek-r1",
    "qwen2_moe": "qwen1.5-moe-a2.7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "olmoe": "olmoe-1b-7b",
    "phimoe": "phi-3.5-moe",
    "glm4_moe": "glm-4.5-air",
}


def variant(family: str, seed: int) -> dict:
    """A small configuration of a family, its keys drawn at random, some left out or null."""
    rng = random.Random(f"{family} {seed}")
    hf = config(FAMILIES[family])
    hf.pop("quantization_config", None)
    hf.pop("layer_types", None)
    layers, heads = rng.randint(1, 6), rng.choice([4, 8])
    mla = family.startswith("deepseek")
    hf |= {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if mla else rng.choice([1, 2, heads]),
        "hidden_size": rng.choice([64, 128]),
        "intermediate_size": rng.choice([96, 160]),
        "vocab_size": rng.choice([128, 256]),
        "num_experts_per_tok": rng.randint(1, 4),
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": rng.choice([None, 1, [1, 2]]),
    }
    (experts,) = hf.keys() & {"n_routed_experts", "num_local_experts", "num_experts"}
    hf[experts] = rng.choice([4, 8])
    if "moe_intermediate_size" in hf:
        hf["moe_intermediate_size"] = rng.choice([32, 48])
    if mla:
        hf |= {
            "q_lora_rank": rng.choice([None, 24]),
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": rng.choice([16, 24]),
        }
    else:
        hf.pop("head_dim", None)
        if family != "olmoe" and rng.random() < 0.5:
            hf["head_dim"] = 32
        elif family == "mixtral":
            hf["head_dim"] = None
    if "first_k_dense_replace" in hf:
        hf |= {"n_group": 1, "topk_group": 1, "n_shared_experts": rng.randint(1, 3)}
        hf["first_k_dense_replace"] = rng.randint(0, layers)
        if rng.random() < 0.3:
            del hf["first_k_dense_replace"]
    if family.startswith("qwen"):
        hf["decoder_sparse_step"] = rng.randint(1, 3)
        hf["mlp_only_layers"] = rng.choice([[], None, [0], [1, 2]])
    if family == "qwen2_moe":
        slides = rng.random() < 0.5
        hf |= {"use_sliding_window": slides, "sliding_window": 64 if slides else None}
        hf |= {"max_window_layers": rng.randint(0, layers), "qkv_bias": rng.random() < 0.5}
        hf["shared_expert_intermediate_size"] = rng.choice([64, 96])
    elif family != "mixtral":
        hf["attention_bias"] = rng.random() < 0.5
    if family == "glm4_moe":
        hf["use_qk_norm"] = rng.random() < 0.5
    if family == "phimoe":
        hf["lm_head_bias"] = rng.random() < 0.5
    return hf


@pytest.mark.cpu
@pytest.mark.parametrize("family", FAMILIES)
def test_variants_count_as_their_real_module_trees(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for seed in range(12):
        hf = variant(family, seed)
        spec = ModelSpec.from_config(hf)
        keys = {k: v for k, v in hf.items() if k != "model_type"}
        real_config = transformers.AutoConfig.for_model(family, **keys)
        with torch.device("meta"):
            real = transformers.AutoModelForCausalLM.from_config(real_config)
        tensors = {k: p.numel() for k, p in real.named_parameters()}
        assert spec.n_params == sum(tensors.values()), hf
        assert spec.routed_params == sum(n for k, n in tensors.items() if ".experts." in k), hf
        for i, layer in enumerate(spec.layers):
            of = {k: n for k, n in tensors.items() if k.startswith(f"model.layers.{i}.")}
            dense = sum(n for k, n in of.items() if ".experts." not in k)
            assert layer.dense_params == dense, (i, hf)
        if family in ("gpt_oss", "qwen2_moe") and real_config.sliding_window:
            slides = [kind == "sliding_attention" for kind in real_config.layer_types]
            assert [x.attention.window is not None for x in spec.layers] == slides, hf
        for again in (json.loads(real_config.to_json_string()), real_config.to_dict()):
            assert ModelSpec.from_config(again).layers == spec.layers, hf
