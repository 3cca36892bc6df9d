"""Rotary position embeddings: frequencies from a configuration, and the angles of positions.

Frequencies are computed in float32 on the CPU, operation by operation as transformers does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moegen.errors import InvalidInput
from moegen.graph.model import ModelSpec

SUPPORTED = ("default", "yarn")


class Rope:
    """The rotary embedding of a model.

    Parameters
    ----------
    spec : ModelSpec
    dim : int
        Elements of a head that are rotated.

    Raises
    ------
    InvalidInput
        If the configuration asks for a kind of scaling that is not supported.
    """

    def __init__(self, spec: ModelSpec, dim: int, device: torch.device) -> None:
        kind = spec.rope["rope_type"]
        if kind not in SUPPORTED:
            raise InvalidInput(
                f"{spec.name}: rope_type {kind!r} is not supported; "
                f"supported are {', '.join(SUPPORTED)}"
            )
        if spec.rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise InvalidInput(f"{spec.name}: partial_rotary_factor is not supported")
        theta = float(spec.rope["rope_theta"])
        powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.scaling = 1.0
        self.factor = 1.0  # how much longer the context is than the one trained on
        inv_freq = 1.0 / powers
        if kind == "yarn":
            original = spec.rope.get("original_max_position_embeddings") or spec.max_context
            self.factor = float(spec.rope.get("factor") or spec.max_context / original)
            inv_freq, self.scaling = _yarn(spec.rope, powers, theta, self.factor, original)
        self.inv_freq = inv_freq.to(device)

    def angles(self, pos: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Cosines and sines of positions [T], attention factor applied: float32 [T, dim / 2]."""
        torch.mul(pos[:, None], self.inv_freq, out=cos)
        torch.sin(cos, out=sin)
        cos.cos_()
        if self.scaling != 1.0:
            cos.mul_(self.scaling)
            sin.mul_(self.scaling)


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """Growth of attention with the context's (YaRN, arXiv:2309.00071, section 3.4)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(
    rope: dict[str, Any], powers: Tensor, theta: float, factor: float, original: int
) -> tuple[Tensor, float]:
    """Frequencies blended between stretched and plain ones, and the factor on cos and sin."""
    scaling = rope.get("attention_factor")
    if scaling is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        scaling = yarn_mscale(factor)
        if mscale and all_dim:
            scaling = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    dim = 2 * len(powers)

    def turns_at(rotations: float) -> float:
        # The dimension that makes so many turns over the original context.
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(rope.get("beta_fast") or 32), turns_at(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(powers), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    inv_freq = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inv_freq, float(scaling)
