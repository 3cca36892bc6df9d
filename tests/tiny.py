"""Tiny checkpoints with random weights, and the transformers models that they came from.

Each maker writes a checkpoint into ``path`` and returns ``(path, model)``. The weights are
wide enough that greedy text does not fall into a loop of one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, MixtralConfig, MixtralForCausalLM

# "hub": one tensor for each expert's matrix, as on the Hub. "fused": as transformers 5 holds it.
CheckpointLayout = Literal["hub", "fused"]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}


def tiny_mixtral(
    path: Path | str,
    seed: int = 0,
    *,
    layout: CheckpointLayout = "hub",
    sharded: bool = False,
    **over: Any,
) -> tuple[Path, MixtralForCausalLM]:
    """A Mixtral of 3 layers, 8 experts, top 2; ``over`` replaces keys of its configuration."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    model = MixtralForCausalLM(MixtralConfig(**(config | over)))
    return _save(model, Path(path), layout, sharded)


def tiny_deepseek_v2(
    path: Path | str,
    seed: int = 0,
    *,
    layout: CheckpointLayout = "hub",
    sharded: bool = False,
    **over: Any,
) -> tuple[Path, DeepseekV2ForCausalLM]:
    """A DeepSeek-V2 of one dense and 3 MoE layers: YaRN, shared experts, top 3 in 2 of 4 groups."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
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
        "n_shared_experts": 2,
        # More experts a token than groups: else the best experts lie in the best groups anyway.
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
        "norm_topk_prob": False,
        "max_position_embeddings": 256,
        "rope_parameters": YARN,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**(config | over)))
    return _save(model, Path(path), layout, sharded)


def _save(model: Any, path: Path, layout: CheckpointLayout, sharded: bool) -> tuple[Path, Any]:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # transformers makes norms 1 and biases 0, which hides mix-ups
                noise = 0.2 * torch.randn(p.shape)
                p.copy_(1 + noise if name.endswith("norm.weight") else noise)
    model.eval()
    model.save_pretrained(
        path,
        save_original_format=layout == "hub",
        max_shard_size="64KB" if sharded else "50GB",
    )
    assert (path / "model.safetensors.index.json").exists() == sharded
    return path, model


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, for tests that change one."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            tensors |= {key: f.get_tensor(key).clone() for key in f.keys()}
    return tensors


def rewrite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a checkpoint's weights by one file with ``tensors``."""
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors")


def edit_config(path: Path, **over: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | over))


def steer(hf: torch.nn.Module, features: torch.Tensor) -> None:
    """Let ``features`` [V, E] decide the routing: expert e likes a token by its e-th feature.

    They become the first features of the residual stream: embeddings set them, no layer adds
    to them, and the router reads nothing else.
    """
    n = features.shape[1]
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if name.endswith("embed_tokens.weight"):
                p[:, :n] = features
            elif "o_proj" in name or "down_proj" in name:
                p[..., :n, :] = 0.0
            elif name.endswith("post_attention_layernorm.weight"):
                p[:n] = 1.0
            elif name.endswith("gate.weight"):
                p.zero_()
                p[:, :n] = 4 * torch.eye(n, device=p.device, dtype=p.dtype)


def distinct_features(vocab: int, seed: int = 3) -> torch.Tensor:
    """Each token ranks the 8 experts in an order of its own, and never nearly alike."""
    g = torch.Generator().manual_seed(seed)
    ranks = torch.rand(vocab, 8, generator=g).argsort(dim=1)
    return (ranks - 3.5) / 2


def give_tokenizer(path: Path) -> Path:
    """Give a checkpoint of 128 tokens a tokenizer: a token for each ASCII character, BOS first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    vocab = {chr(i): i for i in range(len(special), 128)}
    vocab |= {token: i for i, token in enumerate(special)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(path)
    return path
