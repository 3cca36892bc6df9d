"""What a GPU allocator and CUDA's libraries take beside the tensors that a plan counts.

torch's caching allocator takes memory from the driver in segments and keeps them; its
``max_memory_reserved`` is what a process is seen to hold. A run therefore asks for few large
blocks, and what libraries ask for in between is reserved before it begins.
"""

from __future__ import annotations

from moegen.graph.model import ModelSpec, Phase
from moegen.graph.sizes import Capacity
from moegen.units import MIB

# Of torch's caching allocator (c10/cuda/CUDACachingAllocator): requests of up to 1 MiB share
# segments of 2 MiB, those below 10 MiB come out of segments of 20 MiB, others are rounded up.
_SMALL, _SMALL_SEGMENT, _SEGMENT, _ROUND = MIB, 2 * MIB, 20 * MIB, 2 * MIB
# Small tensors have a segment on each stream that makes any: constants, the GPU lane's reductions,
# where the KV lane's windows begin.
SMALL_BYTES = 3 * _SMALL_SEGMENT
# What torch gives cuBLAS to work in on one stream of a Hopper GPU; others get less.
CUBLAS_BYTES = 32 * MIB


def reserved_bytes(n_bytes: int) -> int:
    """What the allocator takes from the driver for a block, at most.

    A block between 1 and 20 MiB is charged a segment of its own, so that a larger block never
    costs less.
    """
    if n_bytes == 0:
        return 0
    if n_bytes <= _SMALL:
        return _SMALL_SEGMENT
    return max(_SEGMENT, -(-n_bytes // _ROUND) * _ROUND)


def workspace_bytes(model: ModelSpec) -> int:
    """Workspaces of the matrix libraries: cuBLAS, and cuBLASLt where a product has a bias."""
    biased = any(x.attention.qkv_bias or x.attention.out_bias for x in model.layers)
    return CUBLAS_BYTES * (1 + biased)


def returned_bytes(model: ModelSpec, phase: Phase, c: Capacity) -> int:
    """The most that a library's call returns in memory of its own.

    Fused attention over packed prompts (half precision, grouped queries) returns its output
    and a float32 sum a head.
    """
    if phase != "prefill" or model.act_bytes != 2:
        return 0
    return max(
        0 if at.kind == "mla" else _attention(c.staged_tokens, at.n_heads, at.head_dim)
        for at in (x.attention for x in model.layers)
    )


def _attention(n: int, heads: int, width: int) -> int:
    # Each request is rounded to 512 bytes; a state of the random generator is among them.
    return n * heads * (2 * width + 4) + 4 * 512
