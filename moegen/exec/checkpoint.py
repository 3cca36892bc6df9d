"""Safetensors checkpoints: which file holds which tensor, and errors that a person can act on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moegen.errors import InvalidInput

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What people have instead of safetensors, and what to do about it.
_OTHER_FORMATS = {
    "*.gguf": "GGUF weights are not supported",
    "pytorch_model*.bin": "it has PyTorch .bin weights: save it again with safetensors",
    "*.bin": "it has .bin weights: save it again with safetensors",
    "*.pth": "it has .pth weights: convert it to a Hugging Face checkpoint",
}


class Checkpoint:
    """A folder of safetensors: one file, or shards with an index.

    Parameters
    ----------
    path : str or Path

    Attributes
    ----------
    files : dict of str to Path
        The file of each tensor.

    Raises
    ------
    InvalidInput
        If there is no such folder, it holds no safetensors, its index names a shard that is
        not there, or a file is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise InvalidInput(f"{self.path} is no folder with a checkpoint")
        index = self.path / INDEX
        if index.is_file():
            self.files = self._from_index(index)
            return
        found = sorted(self.path.glob("*.safetensors"))
        single = self.path / SINGLE
        self.files = {}
        for file in [single] if single in found else found:
            with opened(file) as f:
                self.files |= dict.fromkeys(f.keys(), file)
        if not self.files:
            raise InvalidInput(f"{self.path} holds no *.safetensors{self._what_instead()}")

    def _from_index(self, index: Path) -> dict[str, Path]:
        try:
            shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {key: self.path / shard for key, shard in shards.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise InvalidInput(f"{index} is no index of shards: {e!r}") from e
        absent = sorted({f.name for f in files.values() if not f.is_file()})
        if absent:
            raise InvalidInput(
                f"{index} names {len(absent)} file(s) that are not there, the first "
                f"{absent[0]}: the download is incomplete"
            )
        return files

    def _what_instead(self) -> str:
        for pattern, advice in _OTHER_FORMATS.items():
            if any(self.path.glob(pattern)):
                return f"; {advice}"
        return ""


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open safetensors file, memory-mapped.

    Raises
    ------
    InvalidInput
        If the file is cut short, is no safetensors file, or cannot be read.
    """
    try:
        with safe_open(str(file), framework="pt", device="cpu") as f:
            yield f
    except SafetensorError as e:
        raise InvalidInput(
            f"{file} cannot be read ({file.stat().st_size} bytes): {e}; it is cut short or "
            f"damaged, fetch it again"
        ) from e
    except OSError as e:
        raise InvalidInput(f"{file} cannot be read: {e}") from e
