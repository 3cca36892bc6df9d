"""Safetensors checkpoints: which file holds which tensor where, and errors people can act on.

Headers are checked by the safetensors library; tensors are then read with plain file reads, in
pieces, straight to where they belong. A memory map would count every page of a shard as this
process's own memory until the shard is closed, and fault on each.
"""

from __future__ import annotations

import json
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

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


# What is converted is read in pieces of this size; other tensors need no memory of their own.
_PIECE_BYTES = 8 * 1024 * 1024
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Stored(NamedTuple):
    """A tensor in a file: its type by safetensors' name, shape, and where its bytes begin."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """A folder of safetensors: one file, or shards with an index.

    Parameters
    ----------
    path : str or Path

    Attributes
    ----------
    tensors : dict of str to Stored

    Raises
    ------
    InvalidInput
        If there is no such folder, it holds no safetensors, its index names a shard that is
        not there or a tensor that its shard lacks, or a file is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise InvalidInput(f"{self.path} is no folder with a checkpoint")
        self.tensors: dict[str, Stored] = {}
        index = self.path / INDEX
        if index.is_file():
            files = self._from_index(index)
            for file in sorted(set(files.values())):
                there = _header(file)
                for key in (k for k, of in files.items() if of == file):
                    if key not in there:
                        raise InvalidInput(f"{file} has no tensor {key}, though the index says so")
                    self.tensors[key] = there[key]
            return
        found = sorted(self.path.glob("*.safetensors"))
        single = self.path / SINGLE
        for file in [single] if single in found else found:
            self.tensors |= _header(file)
        if not self.tensors:
            raise InvalidInput(f"{self.path} holds no *.safetensors{self._what_instead()}")

    def require(self, key: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that cannot be used: one of another shape, or quantised.

        Raises
        ------
        InvalidInput
        """
        stored = self.tensors[key]
        if stored.shape != shape:
            raise InvalidInput(
                f"{stored.file}: tensor {key} has shape {list(stored.shape)}, wanted {list(shape)}"
            )
        if stored.dtype not in _FLOATS:
            raise InvalidInput(
                f"{stored.file}: tensor {key} has dtype {stored.dtype}: quantised weights are not "
                f"supported"
            )

    def read(self, key: str, target: Tensor, first: int = 0) -> None:
        """Fill a contiguous tensor with elements of a stored one, from element ``first`` on.

        Raises
        ------
        InvalidInput
            If the file ends early or cannot be read.
        """
        stored = self.tensors[key]
        dtype = _FLOATS[stored.dtype]
        flat, width = target.view(-1), dtype.itemsize
        at = stored.offset + first * width
        try:
            with stored.file.open("rb", buffering=0) as f:
                f.seek(at)
                if dtype == flat.dtype:
                    _fill(f, flat)
                    return
                part = torch.empty(min(len(flat), _PIECE_BYTES // width), dtype=dtype)
                for begin in range(0, len(flat), len(part)):
                    piece = part[: len(flat) - begin]
                    _fill(f, piece)
                    flat[begin : begin + len(piece)].copy_(piece)
        except EOFError as e:
            raise InvalidInput(
                f"{stored.file} ends within tensor {key}: it was cut short while it was read"
            ) from e
        except OSError as e:
            raise InvalidInput(f"{stored.file} cannot be read: {e.strerror or e}") from e

    def _from_index(self, index: Path) -> dict[str, Path]:
        """The file of each tensor."""
        try:
            shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {key: self.path / shard for key, shard in shards.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise InvalidInput(
                f"{index} is no index of shards ({e!r}): fetch it again, or remove it if all "
                "weights are in one file"
            ) from e
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


def _header(file: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file.

    Raises
    ------
    InvalidInput
        If the file is cut short, is no safetensors file, or cannot be read.
    """
    try:
        with safe_open(str(file), framework="pt", device="cpu"):
            pass  # the library looks at the whole header, and at the length of the file
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except SafetensorError as e:
        raise InvalidInput(
            f"{file} cannot be read ({file.stat().st_size} bytes): {e}; it is cut short or "
            f"damaged, fetch it again"
        ) from e
    except OSError as e:
        raise InvalidInput(f"{file} cannot be read: {e}") from e
    return {
        key: Stored(file, x["dtype"], tuple(x["shape"]), 8 + length + x["data_offsets"][0])
        for key, x in header.items()
        if key != "__metadata__"
    }


def _fill(file: FileIO, target: Tensor) -> None:
    """Read as many bytes as a flat tensor has."""
    left = memoryview(target.view(torch.uint8).numpy().data)
    while left:
        n = file.readinto(left[:_PIECE_BYTES])
        if not n:
            raise EOFError
        left = left[n:]
