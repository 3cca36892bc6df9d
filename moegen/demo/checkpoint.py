"""A small Mixture-of-Experts checkpoint that speaks English.

The MLP of :func:`moegen.demo.dense.dense_model` is copied into every expert of a Mixtral
configuration, in front of a random router. Routing weights sum to one, so any routing computes
the dense MLP, and the checkpoint must generate what the dense model generates.

Each expert holds the same function in a form of its own: neuron ``i`` of expert ``e`` is neuron
``perm_e[i]`` of the dense MLP, its row of the up projection times ``2**k_e[i]``, its column of
the down projection times ``2**-k_e[i]``. Powers of two round nothing, so the function is exact,
while an expert made of parts of two experts is noise. A copy that lands late, or in the wrong
slot, then shows in the text.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moegen.demo.dense import dense_model, dense_texts
from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import Request
from moegen.units import format_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Layout = Literal["hub", "fused"]

#: What the dense model says to the requests that the checkpoint was made with, as JSON lines.
DENSE_TEXTS = "dense-texts.jsonl"
_MARKER = "moegen-demo.json"
_SHARD_BYTES = 200_000_000
_LARGEST_POWER = 3


@dataclass(frozen=True)
class _Settings:
    """What decides every byte of the checkpoint."""

    n_experts: int
    top_k: int
    seed: int
    layers: int | None
    dtype: str
    layout: str
    requests: str
    version: int = 3

    def __post_init__(self) -> None:
        for name, least in (("n_experts", 1), ("top_k", 1), ("seed", 0), ("layers", 1)):
            value = getattr(self, name)
            if name == "layers" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidInput(f"{name} must be a whole number of at least {least}: {value!r}")
        if self.top_k > self.n_experts:
            raise InvalidInput(
                f"top_k is {self.top_k}, but there are only n_experts = {self.n_experts} to choose"
            )
        for name, choices in (("dtype", ("float32", "bfloat16")), ("layout", ("hub", "fused"))):
            if getattr(self, name) not in choices:
                raise InvalidInput(f"{name} must be one of {choices}: {getattr(self, name)!r}")


def make_checkpoint(
    folder: str | Path,
    n_experts: int = 4,
    top_k: int = 2,
    seed: int = 0,
    layers: int | None = None,
    dtype: str = "float32",
    layout: Layout = "hub",
    dense: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None,
    requests: Sequence[Request] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the Mixtral checkpoint to ``folder``, unless a whole one is there already.

    Four experts of all 30 layers take 1.5 GB in float32, each further one 0.32 GB.

    Parameters
    ----------
    folder : path
        Where ``config.json``, the tokenizer and the safetensors shards go. The checkpoint appears
        there whole or not at all. A folder that holds anything else is refused.
    n_experts, top_k : int
        Experts a layer, and experts a token.
    seed : int
        Of the router, the permutations and the powers of two.
    layers : int, optional
        Keep only the first layers (nonsense, but quick), as in :func:`dense_model`.
    dtype : {"float32", "bfloat16"}
        Of the stored weights.
    layout : {"hub", "fused"}
        One tensor for each expert's matrix, as on the Hub, or all experts of a layer fused, as
        transformers 5 keeps them.
    dense : tuple, optional
        What :func:`dense_model` returned for the same layers, if at hand: reading it takes longer
        than writing the checkpoint.
    requests : sequence of Request
        What the dense model is to answer as well: its texts go into ``DENSE_TEXTS`` there, one
        JSON line ``{"id", "text"}`` a request. Each must name its ``max_tokens``.
    say : callable
        Told what is done, and why a checkpoint that was there is made anew.

    Raises
    ------
    InvalidInput
        If an argument makes no sense, or ``folder`` holds something else.
    MachineError
        If a package is missing, or the disk is too small.
    """
    settings = _Settings(n_experts, top_k, seed, layers, dtype, layout, _digest(requests))
    folder = Path(folder)
    _refuse_foreign(folder)
    if (flaw := _flaw(folder, settings)) is None:
        return folder
    _require_place(folder)  # now: reading the dense model takes a while
    again = " anew" if (folder / _MARKER).exists() else ""
    say(f"Making the demo checkpoint{again} in {folder}: {flaw}")
    model, tokenizer = dense or dense_model(layers)
    depth = model.config.num_hidden_layers
    if layers is not None and layers != depth:
        raise InvalidInput(f"layers is {layers}, but the dense model has {depth}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _require_space(folder.parent, model, settings)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        building.chmod(0o755)  # mkdtemp keeps others out; a checkpoint is for everyone
        if requests:
            say(f"The dense model answers {len(requests)} prompts, run by transformers")
            _write_texts(building, model, tokenizer, requests)
        _write(building, model, tokenizer, settings)
        if _flaw(folder, settings) is None:  # another process was faster
            return folder
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    except OSError as error:
        raise MachineError(f"cannot write the checkpoint {folder}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _digest(requests: Sequence[Request]) -> str:
    """What tells one set of requests from another."""
    text = json.dumps([asdict(request) for request in requests], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: _Settings,
) -> None:
    _mixtral_config(model.config, settings).save_pretrained(folder)
    assert model.generation_config is not None
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_shards(folder, _mixtral_weights(model, settings))
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    text = json.dumps({"settings": asdict(settings), "files": files}, indent=2)
    (folder / _MARKER).write_text(text + "\n")  # last: it says that the rest is there


def _write_texts(folder: Path, model: Any, tokenizer: Any, requests: Sequence[Request]) -> None:
    texts = dense_texts(model, tokenizer, requests)
    rows = [{"id": r.id, "text": text} for r, text in zip(requests, texts, strict=True)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / DENSE_TEXTS).write_text(lines, encoding="utf-8")


def _mixtral_config(dense: Any, settings: _Settings) -> Any:
    from transformers import MixtralConfig

    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act max_position_embeddings initializer_range "
        "rms_norm_eps bos_token_id eos_token_id pad_token_id tie_word_embeddings rope_parameters"
    ).split()
    return MixtralConfig(
        **{name: getattr(dense, name) for name in same},
        sliding_window=None,
        num_local_experts=settings.n_experts,
        num_experts_per_tok=settings.top_k,
        architectures=["MixtralForCausalLM"],
        dtype=settings.dtype,
    )


def _mixtral_weights(
    model: PreTrainedModel, settings: _Settings
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint with its name, one layer at a time."""
    import torch

    dtype = getattr(torch, settings.dtype)
    random = torch.Generator().manual_seed(settings.seed)
    dense = {name: value.to(dtype) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        dense.pop("lm_head.weight", None)
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        gate, up, down = (dense.pop(f"{prefix}mlp.{m}_proj.weight") for m in ("gate", "up", "down"))
        n_neurons, hidden = gate.shape
        router = torch.randn(settings.n_experts, hidden, generator=random).to(dtype)
        experts = []
        for _ in range(settings.n_experts):
            perm = torch.randperm(n_neurons, generator=random)
            power = torch.randint(
                -_LARGEST_POWER, _LARGEST_POWER + 1, (n_neurons,), generator=random
            )
            scale = torch.exp2(power.float()).to(dtype)
            experts.append((gate[perm], up[perm] * scale[:, None], down[:, perm] / scale))
        if settings.layout == "hub":
            block = f"{prefix}block_sparse_moe."
            yield f"{block}gate.weight", router
            for e, matrices in enumerate(experts):
                for name, matrix in zip(("w1", "w3", "w2"), matrices, strict=True):
                    yield f"{block}experts.{e}.{name}.weight", matrix
        else:
            yield f"{prefix}mlp.gate.weight", router
            fused = torch.stack([torch.cat((gate, up)) for gate, up, _ in experts])
            yield f"{prefix}mlp.experts.gate_up_proj", fused
            yield f"{prefix}mlp.experts.down_proj", torch.stack([down for *_, down in experts])
    yield from dense.items()


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        save_file(pending, folder / f"{len(shards)}.shard", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        pending_bytes = 0

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > _SHARD_BYTES:
            flush()
        pending[name] = tensor.contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    weight_map = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i}.shard").rename(folder / final)
        (folder / final).chmod(0o644)  # safetensors keeps others out
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _flaw(folder: Path, settings: _Settings) -> str | None:
    """Why what is in ``folder`` is not the checkpoint wanted; None if it is, to the byte."""
    try:
        marker = json.loads((folder / _MARKER).read_text())
        made, files = marker["settings"], marker["files"]
    except FileNotFoundError:
        return "there is none yet"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_MARKER} cannot be read"
    if made != asdict(settings):
        return "the one there was made with other settings"
    for name, wanted in files.items():
        path = folder / name
        try:
            n_bytes = path.stat().st_size
            if n_bytes != wanted["bytes"]:
                return f"{name} has {n_bytes} bytes instead of {wanted['bytes']}"
            if _fingerprint(path) != wanted:
                return f"{name} is damaged (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _fingerprint(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file: a second or two for the whole checkpoint."""
    crc = n_bytes = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
            n_bytes += len(block)
    return {"bytes": n_bytes, "crc32": crc}


def _refuse_foreign(folder: Path) -> None:
    """Only an empty folder, or one that carries the marker, may be replaced."""
    if not folder.exists() or (folder / _MARKER).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise InvalidInput(
            f"{folder} exists and is no demo checkpoint (it has no {_MARKER}): "
            "choose another folder, or remove it yourself"
        )


def _require_place(folder: Path) -> None:
    place = folder.absolute().parent
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise InvalidInput(f"{folder} cannot be made: {place} is no folder")
    if not os.access(place, os.W_OK):
        raise InvalidInput(f"{folder} cannot be made: {place} may not be written")


def _require_space(parent: Path, model: PreTrainedModel, settings: _Settings) -> None:
    config = model.config
    expert = 3 * config.hidden_size * config.intermediate_size * config.num_hidden_layers
    width_bytes = 4 if settings.dtype == "float32" else 2
    need = (model.num_parameters() + expert * (settings.n_experts - 1)) * width_bytes
    free = shutil.disk_usage(parent).free
    if need > free:
        raise MachineError(
            f"the checkpoint takes {format_bytes(need)}, but {parent} has {format_bytes(free)} "
            f"free, {format_bytes(need - free)} too little: make room, or ask for fewer experts"
        )
