"""Configurations that no checkpoint has: to try a script out, and for small caps."""

from __future__ import annotations

from typing import Any

TINY = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
# Wide enough that buffers, not rounding, are what memory goes to at 1 or 2 GiB.
SMALL = TINY | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "num_hidden_layers": 8,
}
LATENT = {
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_layer_freq": 1,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
SMALL_LATENT = LATENT | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 32000,
    "n_routed_experts": 32,
}
MADE_UP: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "small": SMALL,
    "tiny-latent": LATENT,
    "small-latent": SMALL_LATENT,
}
