"""ModelSpec: counts and bytes against published and real ones, configurations' quirks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moegen.errors import InvalidInput
from moegen.graph.hf_families import FAMILIES
from moegen.graph.hf_files import CATALOGUE, catalogue
from moegen.graph.layer import Attention
from moegen.graph.model import ModelSpec

# Billions of parameters, counted from the real module tree: all, routed experts.
PARAMS = {
    "mixtral-8x7b": ("46.703", "45.097"),
    "mixtral-8x22b": ("140.630", "135.291"),
    "deepseek-v2": ("235.741", "222.718"),
    "deepseek-v2-lite": ("15.706", "14.395"),
    "deepseek-r1": ("671.026", "653.909"),
    "qwen3-30b-a3b": ("30.532", "28.991"),
    "qwen3-235b-a22b": ("235.094", "227.096"),
    "qwen1.5-moe-a2.7b": ("14.316", "12.457"),
    "gpt-oss-20b": ("20.915", "19.117"),
    "gpt-oss-120b": ("116.829", "114.702"),
    "olmoe-1b-7b": ("6.919", "6.442"),
    "phi-3.5-moe": ("41.873", "40.265"),
    "glm-4.5-air": ("106.852", "99.657"),
    "kimi-k2": ("1026.408", "1014.686"),
}


def config(name: str = "mixtral-8x7b", **changes: object) -> dict:
    return json.loads((CATALOGUE / f"{name}.json").read_text()) | changes


def test_catalogue_is_what_is_tested():
    assert catalogue() == sorted(PARAMS)


@pytest.mark.parametrize("name", PARAMS)
def test_parameters(name):
    m = ModelSpec.from_pretrained(name)
    assert (f"{m.n_params / 1e9:.3f}", f"{m.routed_params / 1e9:.3f}") == PARAMS[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mixtral-8x7b", 131072),
        ("mixtral-8x22b", 229376),
        ("deepseek-v2", 69120),
        ("deepseek-r1", 70272),
        ("deepseek-v2-lite", 31104),
    ],
)
def test_kv_bytes_per_token(name, expected):
    assert ModelSpec.from_pretrained(name).kv_bytes_per_token == expected


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("mixtral-8x7b", "352.3"),
        ("mixtral-8x22b", "604.0"),
        ("deepseek-v2", "47.2"),
        ("deepseek-r1", "44.0"),
    ],
)
def test_expert_bytes(name, megabytes):
    assert f"{ModelSpec.from_pretrained(name).expert_bytes / 1e6:.1f}" == megabytes


def test_fp8_scales_are_counted_beside_the_elements():
    m = ModelSpec.from_pretrained("deepseek-r1")
    moe = m.layers[3]
    assert moe.expert_bytes == 3 * 7168 * 2048
    assert moe.expert_scale_bytes == 4 * 3 * (7168 // 128) * (2048 // 128)
    assert moe.router.bytes == 2 * 256 * 7168  # never quantised
    assert m.weight_bytes == m.head_bytes + sum(
        layer.dense_bytes + 256 * (layer.expert_bytes + layer.expert_scale_bytes)
        if layer.mlp == "moe"
        else layer.dense_bytes
        for layer in m.layers
    )


def test_mxfp4_experts_take_4_25_bits():
    m = ModelSpec.from_pretrained("gpt-oss-20b")
    matrices, biases = 3 * 2880 * 2880, 3 * 2880
    assert m.expert_bytes == matrices * 17 // 32 + 2 * biases
    assert m.layers[0].pre.bytes == 2 * m.layers[0].pre_params


def test_layer_classes():
    m = ModelSpec.from_pretrained("gpt-oss-20b")
    assert m.layer_classes["moe_window"] == tuple(range(0, 24, 2))
    assert m.layers[0] is m.layers[2] and m.layers[0] is not m.layers[1]
    assert m.layers[0].attention.window == 128
    r1 = ModelSpec.from_pretrained("deepseek-r1")
    assert r1.layer_classes == {"dense": (0, 1, 2), "moe": tuple(range(3, 61))}
    assert r1.n_moe_layers == 58


def test_dense_layers_of_the_step_family():
    m = ModelSpec.from_config(config("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[1]))
    assert m.moe_layers == tuple(range(3, 48, 2))


def test_listed_layer_types_win():
    kinds = ["sparse"] * 27
    m = ModelSpec.from_config(config("deepseek-v2-lite", mlp_layer_types=kinds))
    assert m.n_moe_layers == 27
    with pytest.raises(InvalidInput, match="mlp_layer_types must be a list of 27"):
        ModelSpec.from_config(config("deepseek-v2-lite", mlp_layer_types=kinds[1:]))


def test_window_longer_than_the_context_never_slides():
    assert ModelSpec.from_config(config(sliding_window=32768)).layers[0].attention.window is None
    assert ModelSpec.from_config(config(sliding_window=4096)).layers[0].name == "moe_window"
    qwen = config("qwen3-30b-a3b", sliding_window=4096, use_sliding_window=False)
    assert ModelSpec.from_config(qwen).layers[0].attention.window is None


def test_widths_depend_on_the_phase_for_mla_only():
    mla = ModelSpec.from_pretrained("deepseek-v2-lite").layers[1].attention
    assert (mla.kv_width, mla.head_dim) == (576, 192)
    assert (mla.q_width("decode"), mla.out_width("decode")) == (16 * 576, 16 * 512)
    assert (mla.q_width("prefill"), mla.out_width("prefill")) == (16 * 192, 16 * 128)
    gqa = ModelSpec.from_pretrained("mixtral-8x7b").layers[0].attention
    assert gqa.kv_width == 2 * 8 * 128
    assert gqa.q_width("decode") == gqa.q_width("prefill") == gqa.out_width("decode") == 4096


def test_latent_projections_are_split_between_pre_and_post():
    a = ModelSpec.from_pretrained("deepseek-v2-lite").layers[1].attention
    w_uk = w_uv = 16 * 128 * 512
    assert a.pre_params(2048) == 2048 * 16 * 192 + 2048 * 576 + w_uk
    assert a.post_params(2048) == 16 * 128 * 2048 + w_uv


def test_attention_flops():
    gqa = Attention("gqa", n_heads=4, n_kv_heads=2, head_dim=8, v_head_dim=8)
    assert gqa.decode_flops(10) == 2 * 4 * 10 * 16
    assert gqa.prefill_flops(10) == 2 * 4 * 55 * 16
    mla = Attention("mla", 4, 4, 12, 8, None, 16, 4)
    assert mla.decode_flops(10) == 2 * 4 * 10 * (16 + 4 + 16)
    assert mla.prefill_flops(10) == 2 * 4 * 55 * 20
    # A prompt attends as its tokens would one by one, window or not; arrays work alike.
    for window in (None, 3, 50):
        a = Attention("gqa", 4, 2, 8, 8, window=window)
        assert a.prefill_flops(10) == sum(a.decode_flops(n) for n in range(1, 11))
        assert a.prefill_flops(np.array([10, 2])).tolist() == [
            a.prefill_flops(10),
            a.prefill_flops(2),
        ]


def test_parts_add_up():
    for name in catalogue():
        m = ModelSpec.from_pretrained(name)
        for layer in set(m.layers):
            a = layer.attention
            assert layer.pre_params == a.pre_params(m.hidden)
            assert layer.post_params == a.post_params(m.hidden)
            assert layer.n_params == layer.dense_params + layer.n_experts * layer.expert_params


def test_new_and_old_spellings_mean_the_same():
    old = config("deepseek-v2-lite")
    new = config("deepseek-v2-lite")
    new["dtype"] = new.pop("torch_dtype")
    scaling = new.pop("rope_scaling")
    new["rope_parameters"] = {"rope_theta": new.pop("rope_theta"), "rope_type": scaling.pop("type")}
    new["rope_parameters"] |= scaling
    a, b = ModelSpec.from_config(old), ModelSpec.from_config(new)
    assert a.rope == b.rope and a.rope["rope_type"] == "yarn" and a.rope["rope_theta"] == 10000
    assert a.layers == b.layers and a.weight_bytes == b.weight_bytes


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_names_for_the_number_of_experts(key):
    c = config()
    c[key] = c.pop("num_local_experts")
    assert ModelSpec.from_config(c).layers[0].n_experts == 8


def test_with_dtype_and_layers():
    m = ModelSpec.from_pretrained("gpt-oss-20b").with_(dtype="float32", n_layers=3)
    assert m.weight_bytes == 4 * m.n_params
    assert (m.n_layers, m.act_bytes, len(m.layer_classes)) == (3, 4, 2)
    with pytest.raises(InvalidInput, match=r"n_layers must be in 1\.\.3, got 4"):
        m.with_(n_layers=4)
    with pytest.raises(InvalidInput, match="dtype must be one of bfloat16"):
        m.with_(dtype="int3")


def test_tied_embeddings_count_once():
    free, tied = (ModelSpec.from_config(config(tie_word_embeddings=t)) for t in (False, True))
    assert free.n_params - tied.n_params == 32000 * 4096
    assert tied.lm_head_bytes == 0 and tied.lm_head_read_bytes == free.lm_head_read_bytes


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_json_round_trip(name):
    m = ModelSpec.from_pretrained(name)
    again = ModelSpec.from_dict(json.loads(json.dumps(m.to_dict())))
    assert again == m and hash(again) == hash(m) and again.layers == m.layers
    assert again != m.with_(n_layers=2)


def test_directory_and_file(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(InvalidInput, match=r"my-model has no config\.json"):
        ModelSpec.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config(eos_token_id=2)))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    m = ModelSpec.from_pretrained(folder)
    assert m.name == "my-model" and m.eos_token_ids == (2, 7)
    assert ModelSpec.from_pretrained(str(folder / "config.json")) == m
    (folder / "config.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"config\.json cannot be read as JSON"):
        ModelSpec.from_pretrained(folder)


def test_unknown_name_lists_the_catalogue():
    with pytest.raises(InvalidInput, match="'nothing' is no model.*mixtral-8x7b"):
        ModelSpec.from_pretrained("nothing")


def test_hub_id_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InvalidInput, match="needs transformers"):
        ModelSpec.from_pretrained("some-org/some-model")


def test_unsupported_family_names_the_supported():
    with pytest.raises(InvalidInput, match="'llama' is not supported.*mixtral.*glm4_moe"):
        ModelSpec.from_config({"model_type": "llama"})
    with pytest.raises(InvalidInput, match="model_type is missing"):
        ModelSpec.from_config({})


@pytest.mark.parametrize("method", ["gptq", "awq", None])
def test_unsupported_quantisation_is_refused_by_name(method):
    with pytest.raises(InvalidInput, match=f"quantised by {method!r} are not supported"):
        ModelSpec.from_config(config(quantization_config={"quant_method": method}))


@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "num_hidden_layers", "num_local_experts", "rope_theta"]
)
def test_missing_key_names_source_and_key(key, tmp_path):
    c = config()
    del c[key]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(c))
    with pytest.raises(InvalidInput, match=rf"config\.json: key .*{key}.* is missing"):
        ModelSpec.from_pretrained(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", "wide"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 5),
        ("num_experts_per_tok", 9),
        ("eos_token_id", "end"),
        ("tie_word_embeddings", "no"),
        ("rope_theta", 0),
    ],
)
def test_wrong_values_name_the_key(key, value):
    with pytest.raises(InvalidInput, match=key):
        ModelSpec.from_config(config(**{key: value}))


@pytest.mark.cpu
@pytest.mark.parametrize("name", sorted(PARAMS))
def test_counts_equal_the_real_module_tree(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    spec = ModelSpec.from_pretrained(name).with_(dtype="bfloat16", n_layers=5)
    hf = {k: v for k, v in spec.hf.items() if k != "model_type"}
    real_config = transformers.AutoConfig.for_model(spec.model_type, **hf)
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(real_config)
    tensors = dict(real.named_parameters())
    assert spec.n_params == sum(p.numel() for p in tensors.values())
    routed = sum(p.numel() for k, p in tensors.items() if ".experts." in k)
    assert spec.routed_params == routed
    for i, layer in enumerate(spec.layers):
        of_layer = {k: p for k, p in tensors.items() if k.startswith(f"model.layers.{i}.")}
        experts = {k for k in of_layer if ".experts." in k}
        assert layer.dense_params == sum(of_layer[k].numel() for k in of_layer.keys() - experts)
    # What transformers writes itself is read to the same sizes and the same rotary embedding.
    again = ModelSpec.from_config(json.loads(real_config.to_json_string()) | {"dtype": "bfloat16"})
    assert again.layers == spec.layers and again.n_params == spec.n_params
    assert again.rope["rope_theta"] == spec.rope["rope_theta"]
    assert again.rope["rope_type"] == spec.rope["rope_type"]


@pytest.mark.cpu
@pytest.mark.parametrize(
    "name", ["deepseek-v2-lite", "qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-r1"]
)
def test_counts_with_biases_and_norms_switched(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    c = config(name, attention_bias=True, num_hidden_layers=4)
    c.pop("quantization_config", None)
    spec = ModelSpec.from_config(c)
    hf = {k: v for k, v in c.items() if k != "model_type"}
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(spec.model_type, **hf)
        )
    assert spec.n_params == sum(p.numel() for p in real.parameters())


def test_every_family_is_in_the_catalogue_or_an_alias():
    seen = {config(name)["model_type"] for name in catalogue()}
    assert FAMILIES.keys() - seen == {"kimi_k2"}
