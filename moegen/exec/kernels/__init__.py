"""One function an op, checked against the vocabulary of `moegen.graph.ops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from moegen.errors import GraphError
from moegen.exec.kernels import compute, copies
from moegen.graph.ops import OPS

# (program, task, step index, step): does the task's work on the calling lane.
KernelFn = Callable[[Any, Any, int, Any], None]


def check_registry(kernels: Mapping[str, KernelFn]) -> None:
    """Every op has a kernel and every kernel an op.

    Raises
    ------
    GraphError
        Naming those that do not.
    """
    odd = kernels.keys() ^ OPS.keys()
    if odd:
        names = ", ".join(sorted(odd))
        raise GraphError(f"ops without a kernel, or kernels without an op: {names}")


KERNELS: dict[str, KernelFn] = {
    name: cast(KernelFn, fn)
    for module in (compute, copies)
    for name, fn in vars(module).items()
    if name in OPS and callable(fn)
}
check_registry(KERNELS)
