"""Which implementation of the primitives a device gets."""

from __future__ import annotations

import torch

from moegen.exec.primitives import Primitives


def primitives_for(device: torch.device) -> Primitives:
    """Fused kernels on CUDA, torch elsewhere.

    Raises
    ------
    MachineError
        On CUDA, if Triton cannot be used.
    """
    if device.type == "cuda":
        from moegen.exec.primitives.cuda import Cuda  # needs Triton

        return Cuda()
    from moegen.exec.primitives.reference import Reference

    return Reference()
