"""How much shared memory a kernel may count on."""

from __future__ import annotations

from functools import lru_cache

import torch

# The least of any GPU since Ampere, but for 1 KiB that a block is charged for.
_LEAST_BYTES = 98 * 1024


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block's buffers may take on ``device``, in bytes."""
    if device.type != "cuda":
        return _LEAST_BYTES  # the interpreter: as if it were a small one
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return most - 1024
