"""How weights are stored: element sizes, fp8 and mxfp4, and what is left out of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from moegen.errors import InvalidInput
from moegen.graph.layer import Matrix, Part

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Keys under which others say that they quantised the weights.
_KEYS = ("quantization_config", "compression_config", "quantization")
# Where the matrices of a layer are; norms, routers, embeddings and the output are in none of them.
Where = Literal["attention", "dense", "shared", "experts"]


@dataclass(frozen=True)
class Format:
    """How weights are stored: ``scheme`` applies to what is quantised, ``item`` to the rest.

    fp8 is of all matrices of layers but the router's, mxfp4 of the routed experts alone;
    ``kept`` are those that the configuration leaves out.
    """

    item: int
    scheme: Literal["fp8", "mxfp4"] | None = None
    block: tuple[int, int] | None = None
    kept: frozenset[Where] = frozenset()

    def plain(self, params: int) -> Part:
        """Elements that are never quantised."""
        return Part(params, params * self.item)

    def linear(self, where: Where, matrices: list[Matrix], biases: int = 0) -> Part:
        """Matrices as (out, in), with ``biases`` unquantised elements beside them."""
        params = sum(o * i for o, i in matrices)
        rest = self.plain(biases)
        if where in self.kept:
            return self.plain(params) + rest
        if self.scheme == "fp8":
            # A float32 scale for each block, or for each matrix.
            block = self.block
            blocks = sum(
                1 if block is None else -(-o // block[0]) * -(-i // block[1]) for o, i in matrices
            )
            return Part(params, params, 4 * blocks) + rest
        if self.scheme == "mxfp4" and where == "experts":
            # 4-bit elements, one scale byte for each 32 along the input.
            return Part(params, sum(o * (i // 2 + -(-i // 32)) for o, i in matrices)) + rest
        return self.plain(params) + rest


def read_format(hf: dict[str, Any], source: str, sparse: list[bool]) -> tuple[str, Format]:
    """The dtype of a configuration, and how its weights are stored.

    Parameters
    ----------
    sparse : list of bool
        Which layers have routed experts.

    Raises
    ------
    InvalidInput
        If the dtype is unknown, or weights are quantised in another way.
    """
    # transformers 5 writes "dtype"; a configuration that names none is taken as bfloat16.
    key = "dtype" if hf.get("dtype") is not None else "torch_dtype"
    dtype = str(hf.get(key) or "bfloat16").removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise InvalidInput(f"{source}: {key} must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
    item = ITEM_BYTES[dtype]
    quant = next((hf[key] for key in _KEYS if hf.get(key)), None)
    if quant is None:
        return dtype, Format(item)
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if method not in ("fp8", "mxfp4"):
        raise InvalidInput(
            f"{source}: weights quantised by {method!r} are not supported; "
            f"supported are fp8, mxfp4 and unquantised weights"
        )
    block = quant.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    ):
        raise InvalidInput(f"{source}: weight_block_size must be two sizes, got {block!r}")
    kept = _kept(quant.get("modules_to_not_convert"), method, source, sparse)
    return dtype, Format(item, method, tuple(block) if block else None, kept)


# A module's name from its layer on, as a pattern of modules_to_not_convert may give it.
_MODULE = re.compile(r"(?:(?:model\.)?layers\.(?P<layer>\d+|\*)(?:\.|$))?(?P<rest>.*)")
# Modules that hold the matrices of one place, and those that hold none that is quantised.
_WHOLE: dict[str, tuple[Where, ...]] = {
    "": ("attention", "dense", "shared", "experts"),
    "self_attn": ("attention",),
    "mlp": ("dense", "shared", "experts"),
    "block_sparse_moe": ("experts",),
    "mlp.experts": ("experts",),
    "block_sparse_moe.experts": ("experts",),
    "mlp.shared_experts": ("shared",),
    "mlp.shared_expert": ("shared",),
}
_NEVER = re.compile(r"(.*[._])?(lm_head|embed_tokens|\w*norm|gate|router|shared_expert_gate)$")


def _kept(names: Any, method: str, source: str, sparse: list[bool]) -> frozenset[Where]:
    """Which matrices a configuration leaves unquantised."""
    what = f"{source}: modules_to_not_convert"
    if names is None:
        return frozenset()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"{what} must be a list of names, got {names!r}")
    layers: dict[Where, set[int]] = {}
    for name in names:
        match = _MODULE.fullmatch(name)
        assert match is not None  # the rest takes anything
        layer, rest = match["layer"], match["rest"].rstrip(".*")
        # Layers behind the last predict several tokens, and are not counted.
        if _NEVER.fullmatch(rest) or (layer not in (None, "*") and int(layer) >= len(sparse)):
            continue
        if rest not in _WHOLE or (not rest and layer is None):
            if method == "mxfp4" and "experts" not in rest:
                continue  # nothing but experts is quantised
            raise InvalidInput(
                f"{what} names {name!r}: whether the whole of attention, the MLP, shared or routed "
                f"experts is quantised can be told apart, and no less"
            )
        of = range(len(sparse)) if layer in (None, "*") else [int(layer)]
        for where in _WHOLE[rest]:
            layers.setdefault(where, set()).update(of)
    return frozenset(w for w, of in layers.items() if _all_or_none(w, of, sparse, what))


def _all_or_none(where: Where, of: Iterable[int], sparse: list[bool], what: str) -> bool:
    """Whether layers are all that have matrices in one place; refuse some of them."""
    wanted = {
        i for i, moe in enumerate(sparse) if where == "attention" or moe == (where != "dense")
    }
    named = wanted & set(of)
    if named and named != wanted:
        raise InvalidInput(
            f"{what} leaves out {where} in {len(named)} of the {len(wanted)} layers that have it: "
            f"layers of one kind must be stored alike"
        )
    return bool(named)
