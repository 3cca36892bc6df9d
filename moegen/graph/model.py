"""ModelSpec: a Mixture-of-Experts model as sizes, its layers grouped by class.

Only element counts, widths and bytes live here. How a Hugging Face configuration
becomes one is in :mod:`moegen.graph.hf_config`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput
from moegen.graph.checks import whole
from moegen.graph.layer import Attention, Layer, Part, Phase
from moegen.units import format_bytes

__all__ = ["Attention", "Layer", "ModelSpec", "Part", "Phase"]


@dataclass(frozen=True, eq=False, repr=False)
class ModelSpec:
    """A Mixture-of-Experts model, as sizes.

    Build one with :meth:`from_pretrained` or :meth:`from_config`. Everything follows
    from ``name`` and ``hf`` (the configuration), which alone decide equality and
    make the JSON form.

    Parameters
    ----------
    act_bytes : int
        Bytes of one activation or KV element.
    embed, lm_head, final_norm : Part
        Weights outside the layers; ``lm_head`` is empty where it is the embedding's matrix.
    eos_token_ids : tuple of int
        Tokens that end a row.
    rope : dict
        Rotary embedding under its newest names: ``rope_theta``, ``rope_type`` and more.
    hf : dict
        The configuration as given; JSON-safe.
    """

    name: str
    model_type: str
    hidden: int
    vocab: int
    max_context: int
    layers: tuple[Layer, ...]
    tie_embeddings: bool
    dtype: str
    act_bytes: int
    embed: Part
    lm_head: Part
    final_norm: Part
    eos_token_ids: tuple[int, ...]
    rope: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path) -> ModelSpec:
        """A catalogue name, a checkpoint directory, a config.json, or a Hub id "org/name".

        Raises
        ------
        InvalidInput
            If there is no such model, or its configuration cannot be read.
        """
        from moegen.graph.hf_files import load_config

        if not isinstance(name_or_path, (str, Path)):
            raise InvalidInput(f"a model is named by text or a path, got {name_or_path!r}")
        name, config, source = load_config(name_or_path)
        return cls.from_config(config, name=name, source=source)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], name: str | None = None, *, source: str | None = None
    ) -> ModelSpec:
        """From a Hugging Face configuration as a dict.

        ``source`` is what error messages call it.

        Raises
        ------
        InvalidInput
            If the family or its weight format is not supported, or a key is missing or wrong.
        """
        from moegen.graph.hf_config import parse_config

        return parse_config(config, name, source or f"configuration {name or ''}".strip())

    def with_(self, *, dtype: str | None = None, n_layers: int | None = None) -> ModelSpec:
        """A copy with other element sizes (any quantisation undone) or its first layers alone.

        Raises
        ------
        InvalidInput
            If the dtype is unknown or there are fewer layers than that.
        """
        hf = dict(self.hf)
        if dtype is not None:
            hf.pop("torch_dtype", None)
            hf.pop("quantization_config", None)
            hf["dtype"] = dtype
        if n_layers is not None:
            n_layers = whole(n_layers, "n_layers")
            if not 1 <= n_layers <= self.n_layers:
                raise InvalidInput(f"n_layers must be in 1..{self.n_layers}, got {n_layers}")
            hf["num_hidden_layers"] = n_layers
            for key in ("layer_types", "mlp_layer_types"):
                if hf.get(key):
                    hf[key] = hf[key][:n_layers]
        return ModelSpec.from_config(hf, name=self.name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"name": self.name, "config": self.hf}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSpec:
        """The inverse of :meth:`to_dict`."""
        try:
            name, config = data["name"], data["config"]
        except (KeyError, TypeError):
            raise InvalidInput('a model as a dict needs the keys "name" and "config"') from None
        return cls.from_config(config, name=name)

    @property
    def n_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    @cached_property
    def layer_classes(self) -> dict[str, tuple[int, ...]]:
        """Indices of the layers of each class, in order of first appearance."""
        groups: dict[str, list[int]] = {}
        for i, layer in enumerate(self.layers):
            groups.setdefault(layer.name, []).append(i)
        return {name: tuple(indices) for name, indices in groups.items()}

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mlp == "moe")

    @property
    def n_moe_layers(self) -> int:
        """Layers with routed experts."""
        return len(self.moe_layers)

    @cached_property
    def n_params(self) -> int:
        """Parameters, without multi-token-prediction layers."""
        outside = self.embed + self.lm_head + self.final_norm
        return outside.params + sum(layer.n_params for layer in self.layers)

    @cached_property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return sum(layer.n_experts * layer.expert_params for layer in self.layers)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored: S_Model of Eq. 2."""
        return self.head_bytes + sum(layer.weight_bytes for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert, without fp8 scales; 0 if no layer has any."""
        return self.layers[self.moe_layers[0]].expert_bytes if self.moe_layers else 0

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes that the KV store holds per token, all layers."""
        return sum(layer.kv_bytes_per_token for layer in self.layers)

    @property
    def embed_bytes(self) -> int:
        """Bytes of the token embedding."""
        return self.embed.bytes

    @property
    def lm_head_bytes(self) -> int:
        """Bytes of the output matrix; 0 where it is the embedding's."""
        return self.lm_head.bytes

    @property
    def lm_head_read_bytes(self) -> int:
        """Bytes that computing logits reads, whether tied or not."""
        return self.lm_head.bytes or self.embed.bytes

    @property
    def head_bytes(self) -> int:
        """Bytes outside the layers, always on the GPU: embedding, final norm, output matrix."""
        return self.embed.bytes + self.lm_head.bytes + self.final_norm.bytes

    @cached_property
    def _identity(self) -> tuple[str, str]:
        return self.name, json.dumps(self.hf, sort_keys=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelSpec):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        moe = self.layers[self.moe_layers[0] if self.moe_layers else 0]
        rows = [
            f"ModelSpec {self.name} ({self.model_type}, {self.dtype})",
            f"  parameters  {self.n_params / 1e9:.3f} B, routed {self.routed_params / 1e9:.3f} B",
            f"  weights     {format_bytes(self.weight_bytes)}",
            f"  layers      {self.n_layers}: "
            + ", ".join(f"{len(i)} {name}" for name, i in self.layer_classes.items()),
            f"  experts     {moe.n_experts} a layer, top {moe.top_k}, "
            f"{format_bytes(self.expert_bytes)} each",
            f"  KV          {format_bytes(self.kv_bytes_per_token)} a token",
        ]
        return "\n".join(rows)
