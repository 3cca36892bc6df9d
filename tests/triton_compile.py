"""Compile what a Triton launch would run, for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

Note = Callable[[str, Any], None]


def compile_launches(module: ModuleType, capability: int, note: Note) -> None:
    """Let each kernel of ``module`` be compiled where it is launched; ``note`` gets its name and
    what came of it."""
    for name in [n for n in vars(module) if n.endswith("_kernel")]:
        setattr(module, name, _Launch(getattr(module, name), capability, note))


class _Launch:
    def __init__(self, kernel: Any, capability: int, note: Note) -> None:
        self.kernel, self.capability, self.note = kernel, capability, note

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, **options: Any) -> None:
        # What kernel[grid](*args, **options) would compile, taken from the kernel's own binder.
        kernel, target = self.kernel, GPUTarget("cuda", self.capability, 32)
        backend = make_backend(target)
        binder = triton.runtime.jit.create_function_from_signature(
            kernel.signature, kernel.params, backend
        )
        bound, specialization, opts = binder(*args, **options)
        parsed, signature, constants, attrs = kernel._pack_args(
            backend, options, bound, specialization, opts
        )
        source = ASTSource(kernel, signature, constants, attrs)
        done = triton.compile(source, target=target, options=parsed.__dict__)
        self.note(kernel.fn.__name__, done)
