"""Hugging Face configurations: how each family spells things.

Every naming quirk is absorbed here, so that the rest of moegen sees one ModelSpec.
The counts are checked against the real module trees in ``tests/test_model.py``.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.hf_families import FAMILIES, Family
from moegen.graph.hf_files import eos_ids
from moegen.graph.hf_quant import Format, read_format
from moegen.graph.layer import Attention, Layer, Matrix, Part
from moegen.graph.model import ModelSpec


class Config:
    """Checked reads from a configuration; every error names the source and the key."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.data, self.source = data, source

    def fail(self, key: str, wanted: str) -> InvalidInput:
        """The error for a key with a wrong value."""
        return InvalidInput(f"{self.source}: {key} must be {wanted}, got {self.data.get(key)!r}")

    def integer(
        self,
        *keys: str,
        at_least: int = 1,
        at_most: int = 2**40,
        default: int | None = None,
    ) -> int:
        """The first of ``keys`` that is there, as a whole number."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
                raise self.fail(key, f"a whole number of at least {at_least}")
            if value > at_most:
                raise self.fail(key, f"at most {at_most}")
            return value
        if default is None:
            raise InvalidInput(f"{self.source}: key {' or '.join(keys)} is missing")
        return default

    def check_number(self, key: str, *, at_least: float | None = None) -> None:
        """Refuse a key whose value is there and is no such number; null is none either."""
        if key in self.data:
            number(self.data[key], f"{self.source}: {key}", at_least=at_least)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean key."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def bias(self, rule: bool | tuple[str, bool]) -> bool:
        """A family's bias rule."""
        return rule if isinstance(rule, bool) else self.flag(*rule)

    def kinds(self, key: str, n: int, allowed: tuple[str, str]) -> list[bool] | None:
        """A list with one of two words per layer, as "is it the first?"; None if not there."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n or any(v not in allowed for v in value):
            raise self.fail(key, f"a list of {n} of {allowed[0]!r} or {allowed[1]!r}")
        return [word == allowed[0] for word in value]


# No model is near; a configuration that says more is damaged, and would fill memory.
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 100_000


def _mlp(hidden: int, width: int) -> list[Matrix]:
    return [(width, hidden), (width, hidden), (hidden, width)]


def parse_config(data: dict[str, Any], name: str | None, source: str) -> ModelSpec:
    """A ModelSpec from a configuration; see :meth:`ModelSpec.from_config`."""
    if not isinstance(data, dict):
        raise InvalidInput(f"{source}: a configuration is a dict, got {type(data).__name__}")
    try:
        hf = json.loads(json.dumps(data, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidInput(f"{source}: the configuration is not JSON data: {e}") from e
    model_type = _model_type(hf, source)
    family = FAMILIES[model_type]
    c = Config({**family.defaults, **hf}, source)
    _check_what_runs(c)
    hidden, vocab = c.integer("hidden_size"), c.integer("vocab_size")
    max_context = c.integer("max_position_embeddings")
    n_layers = c.integer("num_hidden_layers", at_most=_MOST_LAYERS)
    sparse = _sparse_layers(c, family, n_layers)
    windows = _windows(c, family, n_layers, max_context)
    dtype, fmt = read_format(c.data, source, sparse)
    norm = fmt.plain(family.norm_vectors * hidden)
    tie = c.flag("tie_word_embeddings", False)
    embed = fmt.plain(vocab * hidden)
    lm_head = fmt.plain(vocab if c.flag("lm_head_bias", False) else 0)
    keys = list(zip(sparse, windows, strict=True))
    made = {key: _layer(c, family, fmt, hidden, *key) for key in set(keys)}
    return ModelSpec(
        name=str(name or hf.get("_name_or_path") or model_type),
        model_type=model_type,
        hidden=hidden,
        vocab=vocab,
        max_context=max_context,
        layers=tuple(made[key] for key in keys),
        tie_embeddings=tie,
        dtype=dtype,
        act_bytes=fmt.item,
        embed=embed,
        lm_head=lm_head if tie else embed + lm_head,
        final_norm=norm,
        eos_token_ids=_eos(c),
        rope=_rope(c, family),
        hf=hf,
    )


def _model_type(hf: dict[str, Any], source: str) -> str:
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return model_type
    if model_type is None:
        what = "key model_type is missing"
    else:
        what = f"family {model_type!r} is not supported"
    inner = hf.get("text_config")
    text = inner.get("model_type") if isinstance(inner, dict) else None
    hint = ""
    if isinstance(text, str) and text in FAMILIES:
        hint = (
            f". Its language model is {text!r}, which is: give its text_config alone, and count "
            f"what else the model has yourself"
        )
    raise InvalidInput(f"{source}: {what}; supported are {', '.join(FAMILIES)}{hint}")


def _check_what_runs(c: Config) -> None:
    """Numbers that say nothing about sizes, and that a run reads from the configuration."""
    c.check_number("rms_norm_eps", at_least=0)
    c.check_number("routed_scaling_factor")
    for key in ("n_group", "topk_group"):
        c.integer(key, at_least=0, default=0)


def _eos(c: Config) -> tuple[int, ...]:
    try:
        return eos_ids(c.data)
    except InvalidInput as e:
        raise InvalidInput(f"{c.source}: {e}") from e


def _layer(
    c: Config, family: Family, fmt: Format, hidden: int, sparse: bool, window: int | None
) -> Layer:
    attention = _attention(c, family, hidden, window)
    norms = 2 * family.norm_vectors * hidden + attention.norm_params
    out_bias = hidden if attention.out_bias else 0
    moe, dense = {}, {}
    if sparse:
        moe = _experts(c, family, fmt, hidden)
    else:
        width = c.integer("intermediate_size")
        dense = {"dense_mlp": fmt.linear("dense", _mlp(hidden, width)), "dense_intermediate": width}
    kind: Literal["dense", "moe"] = "moe" if sparse else "dense"
    return Layer(
        name=kind + ("_window" if window else ""),
        mlp=kind,
        attention=attention,
        pre=fmt.linear("attention", attention.pre_matrices(hidden), attention.qkv_bias_params),
        post=fmt.linear("attention", attention.post_matrices(hidden), out_bias),
        norm=fmt.plain(norms),
        kv_bytes_per_token=attention.kv_width * fmt.item,
        **moe,
        **dense,
    )


def _experts(c: Config, family: Family, fmt: Format, hidden: int) -> dict[str, Any]:
    n = c.integer("n_routed_experts", "num_local_experts", "num_experts", at_most=_MOST_EXPERTS)
    # gpt-oss wrote the second name first.
    top_k = c.integer("num_experts_per_tok", "experts_per_token")
    if top_k > n:
        raise c.fail("num_experts_per_tok", f"at most the number of experts, {n}")
    width = c.integer(family.expert_width)
    shared_width, gate = 0, 0
    if family.shared == "count":
        shared_width = width * c.integer("n_shared_experts", at_least=0, default=0)
    elif family.shared == "gated":
        shared_width, gate = c.integer("shared_expert_intermediate_size"), hidden
    shared = fmt.linear("shared", _mlp(hidden, shared_width), gate) if shared_width else Part()
    bias = 2 * width + hidden if family.expert_bias else 0
    return {
        "router": fmt.plain(n * (hidden + family.router_bias)),
        "router_buffer_bytes": 4 * n if family.router_buffer else 0,
        "shared": shared,
        "expert": fmt.linear("experts", _mlp(hidden, width), bias),
        "n_experts": n,
        "top_k": top_k,
        "moe_intermediate": width,
        "shared_intermediate": shared_width,
    }


def _attention(c: Config, family: Family, hidden: int, window: int | None) -> Attention:
    n_heads = c.integer("num_attention_heads")
    qkv_bias, out_bias = c.bias(family.qkv_bias), c.bias(family.out_bias)
    if family.attention == "mla":
        rank = c.integer("q_lora_rank", default=0)
        rope = c.integer("qk_rope_head_dim")
        if rope % 2:
            raise c.fail("qk_rope_head_dim", "even, to rotate its pairs")
        return Attention(
            "mla",
            n_heads,
            n_heads,
            c.integer("qk_nope_head_dim") + rope,
            c.integer("v_head_dim"),
            rank or None,
            c.integer("kv_lora_rank"),
            rope,
            window,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
        )
    n_kv = c.integer("num_key_value_heads", default=n_heads)
    if n_heads % n_kv:
        raise c.fail("num_key_value_heads", f"a divisor of the {n_heads} attention heads")
    if c.data.get("head_dim") is None and hidden % n_heads:
        raise c.fail("hidden_size", f"a multiple of the {n_heads} heads where head_dim is absent")
    dim = c.integer("head_dim", default=hidden // n_heads)
    if dim % 2:
        raise InvalidInput(f"{c.source}: head_dim must be even, to rotate its pairs, got {dim}")
    qk_norm = family.qk_norm
    if qk_norm == "use_qk_norm":
        qk_norm = "head" if c.flag("use_qk_norm", False) else None
    return Attention(
        "gqa",
        n_heads,
        n_kv,
        dim,
        dim,
        window=window,
        qk_norm=qk_norm,
        sinks=family.sinks,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )


def _sparse_layers(c: Config, family: Family, n: int) -> list[bool]:
    """Which layers have routed experts."""
    listed = c.kinds("mlp_layer_types", n, ("sparse", "dense"))
    if listed is not None:
        return listed
    if family.sparse == "first_k":
        first = c.integer("first_k_dense_replace", at_least=0, default=0)
        freq = c.integer("moe_layer_freq", default=1)
        return [i >= first and i % freq == 0 for i in range(n)]
    if family.sparse == "step":
        step = c.integer("decoder_sparse_step", default=1)
        dense = c.data.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise c.fail("mlp_only_layers", "a list of layers")
        return [i not in dense and (i + 1) % step == 0 for i in range(n)]
    return [True] * n


def _windows(c: Config, family: Family, n: int, max_context: int) -> list[int | None]:
    """The sliding window of each layer."""
    window = c.integer("sliding_window", at_least=0, default=0)
    flagged = not family.window.startswith("flag") or c.flag("use_sliding_window", False)
    # A window as long as the longest context never slides.
    if family.window == "none" or not flagged or not 0 < window < max_context:
        return [None] * n
    slides = [True] * n
    if family.window.endswith("alternate"):
        last = c.integer("max_window_layers", at_least=0, default=n)
        slides = c.kinds("layer_types", n, ("sliding_attention", "full_attention")) or [
            i % 2 == 0 and i < last for i in range(n)
        ]
    return [window if s else None for s in slides]


def _rope(c: Config, family: Family) -> dict[str, Any]:
    """One flat dict from ``rope_parameters``, or from ``rope_theta`` and ``rope_scaling``."""
    nested = c.data.get("rope_parameters") or c.data.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise c.fail("rope_parameters", "an object")
    rope = {"rope_theta": c.data.get("rope_theta"), "rope_type": "default"}
    if not nested and family is FAMILIES["gpt_oss"]:
        # What transformers takes where a gpt-oss configuration says nothing.
        nested = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    rope |= {("rope_type" if k == "type" else k): v for k, v in nested.items()}
    if c.data.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", c.data["partial_rotary_factor"])
    if rope["rope_theta"] is None:
        raise InvalidInput(f"{c.source}: key rope_theta is missing")
    if not isinstance(rope["rope_type"], str):
        raise InvalidInput(f"{c.source}: rope_type must be text, got {rope['rope_type']!r}")
    if rope["rope_type"] == "yarn":
        number(rope["rope_theta"], f"{c.source}: rope_theta with yarn", above=1)
    for key in _ROPE_NUMBERS:
        if rope.get(key) is not None:
            number(rope[key], f"{c.source}: {key} of the rotary embedding", above=0)
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            number(rope[key], f"{c.source}: {key} of the rotary embedding", at_least=0)
    return rope


_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
