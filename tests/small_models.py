"""Small models as sizes alone, without torch."""

from __future__ import annotations

from moegen.graph.build import build
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "dtype": "float32",
}
DEEPSEEK = {
    "model_type": "deepseek_v2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_layer_freq": 1,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "dtype": "float32",
}


def mixtral(**over):
    return ModelSpec.from_config(MIXTRAL | over, "mixtral")


def deepseek(**over):
    return ModelSpec.from_config(DEEPSEEK | over, "deepseek")


def two_layers():
    """Two layers, two experts, one row on the CPU and one on the GPU."""
    model = mixtral(num_local_experts=2)
    return build(model, Strategy(B=2, b_a=1, b_e=8, omega=0.5), kv_len=9)
