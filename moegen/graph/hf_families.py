"""How each supported model family names and shapes its parts, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """How one ``model_type`` names and shapes its parts.

    ``sparse`` says which layers have experts, ``window`` which ones slide. A bias is
    True, False, or a (key, default) pair. ``norm_vectors`` is 2 where a norm has a
    bias. ``router_buffer`` is the router's float32 correction bias.
    ``defaults`` is what transformers takes for keys that a configuration leaves out,
    where that is not nothing.
    """

    attention: Literal["gqa", "mla"] = "gqa"
    sparse: Literal["all", "first_k", "step"] = "all"
    window: Literal["none", "all", "flag", "alternate", "flag_alternate"] = "none"
    expert_width: str = "moe_intermediate_size"
    qkv_bias: bool | tuple[str, bool] = False
    out_bias: bool | tuple[str, bool] = False
    qk_norm: Literal["head", "full", "use_qk_norm"] | None = None
    shared: Literal["count", "gated"] | None = None
    norm_vectors: int = 1
    router_bias: bool = False
    router_buffer: bool = False
    expert_bias: bool = False
    sinks: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_ATTENTION_BIAS = ("attention_bias", False)
_DEEPSEEK_V3 = Family(
    attention="mla",
    sparse="first_k",
    shared="count",
    router_buffer=True,
    qkv_bias=_ATTENTION_BIAS,
    out_bias=_ATTENTION_BIAS,
    defaults={
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "eos_token_id": 1,
    },
)

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        window="all",
        expert_width="intermediate_size",
        defaults={"num_key_value_heads": 8, "eos_token_id": 2},
    ),
    "deepseek_v2": Family(
        attention="mla",
        sparse="first_k",
        shared="count",
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
        defaults={"n_shared_experts": 2, "q_lora_rank": 1536, "eos_token_id": 2},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "qwen2_moe": Family(
        sparse="step",
        window="flag_alternate",
        qkv_bias=("qkv_bias", True),
        shared="gated",
        defaults={"num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3_moe": Family(
        sparse="step",
        window="flag",
        qk_norm="head",
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "gpt_oss": Family(
        window="alternate",
        expert_width="intermediate_size",
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        router_bias=True,
        expert_bias=True,
        sinks=True,
        defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    ),
    "olmoe": Family(
        expert_width="intermediate_size",
        qk_norm="full",
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
        defaults={"eos_token_id": 50279},
    ),
    "phimoe": Family(
        window="all",
        expert_width="intermediate_size",
        norm_vectors=2,
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
        defaults={"num_key_value_heads": 8, "eos_token_id": 2},
    ),
    "glm4_moe": Family(
        sparse="first_k",
        qk_norm="use_qk_norm",
        shared="count",
        router_buffer=True,
        qkv_bias=_ATTENTION_BIAS,
        defaults={
            "num_key_value_heads": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
    ),
}
