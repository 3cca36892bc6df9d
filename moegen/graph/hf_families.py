"""How each supported model family names and shapes its parts, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """How one ``model_type`` names and shapes its parts.

    ``sparse`` says which layers have experts, ``window`` which ones slide. A bias is
    True, False, or a (key, default) pair. ``norm_vectors`` is 2 where a norm has a
    bias. ``router_buffer`` is the router's float32 correction bias.
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


_ATTENTION_BIAS = ("attention_bias", False)
_DEEPSEEK_V3 = Family(
    attention="mla",
    sparse="first_k",
    shared="count",
    router_buffer=True,
    qkv_bias=_ATTENTION_BIAS,
    out_bias=_ATTENTION_BIAS,
)

FAMILIES: dict[str, Family] = {
    "mixtral": Family(window="all", expert_width="intermediate_size"),
    "deepseek_v2": Family(
        attention="mla",
        sparse="first_k",
        shared="count",
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "qwen2_moe": Family(
        sparse="step", window="flag_alternate", qkv_bias=("qkv_bias", True), shared="gated"
    ),
    "qwen3_moe": Family(
        sparse="step",
        window="flag",
        qk_norm="head",
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
    ),
    "gpt_oss": Family(
        window="alternate",
        expert_width="intermediate_size",
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        router_bias=True,
        expert_bias=True,
        sinks=True,
    ),
    "olmoe": Family(
        expert_width="intermediate_size",
        qk_norm="full",
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
    ),
    "phimoe": Family(
        window="all",
        expert_width="intermediate_size",
        norm_vectors=2,
        qkv_bias=_ATTENTION_BIAS,
        out_bias=_ATTENTION_BIAS,
    ),
    "glm4_moe": Family(
        sparse="first_k",
        qk_norm="use_qk_norm",
        shared="count",
        router_buffer=True,
        qkv_bias=_ATTENTION_BIAS,
    ),
}
