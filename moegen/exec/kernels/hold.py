"""A kernel that takes a given time, by the GPU's own clock of nanoseconds.

Not by its cycles: a GPU that is busy everywhere runs at a lower clock than one that idles, and
holds by up to a third longer then.
"""

# Triton is not everywhere where types are checked, and its kernels are subscripted by a grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from moegen.exec.kernels.triton_util import require_triton

require_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import globaltimer  # noqa: E402


@triton.jit(do_not_specialize=["ns"])
def _hold_kernel(ns: tl.int64):
    began = globaltimer()
    now = began
    while now - began < ns:
        now = globaltimer()


def hold(seconds: float) -> None:
    """Keep the current stream, and one warp of the GPU, busy for ``seconds``.

    Parameters
    ----------
    seconds : float
        0 takes as long as an empty kernel.
    """
    _hold_kernel[(1,)](round(seconds * 1e9), num_warps=1)
