"""What a GPU allocator and CUDA's libraries take beside the tensors that a plan counts.

torch's caching allocator takes memory from the driver in segments and keeps them; its
``max_memory_reserved`` is what a process is seen to hold. A run therefore asks for few large
blocks, before it begins; while it is on, nothing but small constants and the libraries'
workspaces is allocated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moegen.graph.model import ModelSpec
from moegen.units import MIB

# Of torch's caching allocator (c10/cuda/CUDACachingAllocator): requests of up to 1 MiB share
# segments of 2 MiB, those below 10 MiB come out of segments of 20 MiB, others are rounded up.
_SMALL, _SMALL_SEGMENT, _SEGMENT, _ROUND = MIB, 2 * MIB, 20 * MIB, 2 * MIB
# Small tensors have a segment on each stream that makes any: constants, the GPU lane's reductions,
# where the KV lane's windows begin.
SMALL_BYTES = 3 * _SMALL_SEGMENT


def reserved_bytes(n_bytes: Any) -> Any:
    """What the allocator takes from the driver for a block, at most.

    A block between 1 and 20 MiB is charged a segment of its own, so that a larger block never
    costs less.

    Takes and gives an int or an array of ints.
    """
    if isinstance(n_bytes, np.ndarray):
        large = np.maximum(_SEGMENT, -(-n_bytes // _ROUND) * _ROUND)
        return np.where(n_bytes == 0, 0, np.where(n_bytes <= _SMALL, _SMALL_SEGMENT, large))
    if n_bytes == 0:
        return 0
    if n_bytes <= _SMALL:
        return _SMALL_SEGMENT
    return max(_SEGMENT, -(-n_bytes // _ROUND) * _ROUND)


def library_bytes(model: ModelSpec, workspace_bytes: float) -> int:
    """Workspaces of the matrix libraries: cuBLAS, and cuBLASLt where a product has a bias."""
    biased = any(x.attention.qkv_bias or x.attention.out_bias for x in model.layers)
    return int(workspace_bytes) * (1 + biased)
