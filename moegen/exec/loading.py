"""What an engine starts from: dtype, device, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moegen.errors import InvalidInput
from moegen.exec.lanes import pick_device
from moegen.graph.model import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(spec: ModelSpec, dtype: str | None) -> torch.dtype:
    """The dtype called ``dtype``, else the checkpoint's own."""
    name = dtype or spec.hf.get("dtype") or spec.hf.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def load_tokenizer(path: str | Path) -> Any:
    """The checkpoint folder's tokenizer; None if it has none, InvalidInput if it is damaged."""
    folder = Path(path)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    name = next(n for n in ("tokenizer.json", "tokenizer_config.json") if (folder / n).exists())
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as e:  # as damage is found: its parsers raise what they like
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise InvalidInput(
            f"{folder / name}: no tokenizer can be made of it ({type(e).__name__}: {reason}); "
            f"fetch the tokenizer's files again, or remove them to work with token ids"
        ) from e


def checked_device(name: str | None) -> torch.device:
    """The device called ``name``, as `pick_device` has it; InvalidInput for other kinds."""
    try:
        known = name is None or torch.device(name).type in ("cpu", "cuda")
    except (RuntimeError, TypeError):
        known = False
    if not known:
        raise InvalidInput(f"device must be 'cpu' or 'cuda', got {name!r}")
    return pick_device(name)
