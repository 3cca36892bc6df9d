"""How much shared memory a kernel may count on."""

# Triton is not everywhere where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from functools import lru_cache

import torch
from triton.runtime import driver

# The least of any GPU since Ampere is 99 KiB.
_LEAST_BYTES = 99 * 1024
# For what a kernel keeps beside its blocks, such as the parts of a sum over warps.
_SPARE_BYTES = 1024


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program's blocks may take on ``device``, in bytes."""
    most = _LEAST_BYTES  # in the interpreter: as if it were a small GPU
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        most = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return most - _SPARE_BYTES
