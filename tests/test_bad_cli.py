"""Bad input to ``moegen run`` on a real checkpoint, from outside: exit code, message, no traces.

Each refusal names what is wrong and what to do, shows no traceback, loads no weights and leaves
every folder as it was.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")

from moegen.cli import main  # noqa: E402
from moegen.exec import profile  # noqa: E402
from moegen.exec.weights import HostWeights  # noqa: E402
from moegen.graph.detect import detect  # noqa: E402
from tests.tiny import (  # noqa: E402
    edit_config,
    give_tokenizer,
    rewrite,
    tensors_of,
    tiny_deepseek_v2,
    tiny_mixtral,
)

ROOT = Path(__file__).parents[1]
FAST = ("--device", "cpu", "--omega", "0.5", "--max-tokens", "4")
NOBODY = 65534


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Place:
    """A folder with a checkpoint in ``model``, requests in ``in.jsonl``, and nothing else."""

    def __init__(self, path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.model, self.capsys = path, path / "model", capsys
        shutil.copytree(model, self.model)
        self.requests(line("a"), line("b", "hello"))

    def requests(self, *lines: str) -> None:
        (self.path / "in.jsonl").write_text("".join(f"{x}\n" for x in lines))

    def argv(self, *flags: str, output: str = "out.jsonl") -> list[str]:
        files = ("--input", str(self.path / "in.jsonl"), "--output", str(self.path / output))
        return ["run", "--model", str(self.model), *files, *FAST, *flags]

    def run(self, *flags: str, output: str = "out.jsonl") -> Said:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(self.argv(*flags, output=output))
        code = exit_.value.code
        assert isinstance(code, int)
        said = self.capsys.readouterr()
        return Said(code, said.out, said.err)

    def refuse(self, *flags: str, code: int = 2, output: str = "out.jsonl") -> str:
        """Run, see that it is refused without a trace, and give its one message."""
        before = listing(self.path)
        said = self.run(*flags, output=output)
        assert said.code == code, said
        assert "Traceback" not in said.err and said.out == ""
        assert listing(self.path) == before
        return said.err

    def rows(self, name: str = "out.jsonl") -> list[dict]:
        text = (self.path / name).read_text(encoding="utf-8")
        return [json.loads(x) for x in text.splitlines()]


def line(id: str, prompt: str = "abc", **more: object) -> str:
    return json.dumps({"id": id, "prompt": prompt, **more})


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below, with its size and when it was written."""
    found = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns)
    return found


@pytest.fixture(scope="module", autouse=True)
def known_machine(tmp_path_factory) -> Iterator[None]:
    """A profile with the rates assumed of this machine, so that no process measures it."""

    def assumed(*_: object, **__: object) -> dict[str, tuple[object, str]]:
        rates = {name: getattr(detect(), name) for name in profile.RATES}
        return {k: (v, "measured: made up") for k, v in rates.items() if v is not None}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))
        with pytest.MonkeyPatch.context() as measuring:
            measuring.setattr(profile, "_measure", assumed)
            profile.machine_profile(torch.device("cpu"), torch.float32)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path, _ = tiny_mixtral(
        tmp_path_factory.mktemp("bad-cli") / "model", num_hidden_layers=2, sharded=True
    )
    return give_tokenizer(path)


@pytest.fixture
def place(tmp_path, checkpoint, capsys) -> Place:
    return Place(tmp_path, checkpoint, capsys)


@pytest.fixture
def unloaded(monkeypatch) -> None:
    """No weight may be read."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(HostWeights, "load", load)


def test_a_good_job_runs(place):
    said = place.run()
    assert said.code == 0, said.err
    assert [row["id"] for row in place.rows()] == ["a", "b"]
    assert all(
        row["completion_tokens"] == 4 or "stop" in row["finish_reason"] for row in place.rows()
    )


# The checkpoint


def test_a_missing_folder(place, unloaded):
    place.model.rename(place.path / "elsewhere")
    said = place.refuse()
    assert f"--model: {place.model} is no folder" in said


def test_a_folder_without_a_checkpoint(place, unloaded):
    shutil.rmtree(place.model)
    place.model.mkdir()
    assert f"{place.model} has no config.json" in place.refuse()


def shards(place: Place) -> list[Path]:
    return sorted(place.model.glob("*.safetensors"))


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_truncated_shard(place, unloaded, left):
    shard = shards(place)[1]
    with shard.open("r+b") as file:
        file.truncate(left if left >= 0 else shard.stat().st_size + left)
    said = place.refuse()
    assert str(shard) in said and "cut short or damaged" in said and "fetch it again" in said


def test_a_missing_shard(place, unloaded):
    shards(place)[1].unlink()
    said = place.refuse()
    assert "model.safetensors.index.json names 1 file(s) that are not there" in said
    assert "model-00002-of-" in said and "download is incomplete" in said


def test_all_weights_missing(place, unloaded):
    for path in place.model.glob("model*"):
        path.unlink()
    (place.model / "weights.gguf").write_bytes(b"GGUF")
    said = place.refuse()
    assert f"{place.model} holds no *.safetensors" in said and "GGUF" in said


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_family_that_does_not_run(place, unloaded, family):
    edit_config(place.model, model_type=family, moe_intermediate_size=96)
    said = place.refuse()
    assert family in said and "mixtral" in said


def test_a_quantised_model(place, unloaded):
    edit_config(place.model, quantization_config={"quant_method": "gptq", "bits": 4})
    said = place.refuse()
    assert "config.json: weights quantised by 'gptq' are not supported" in said


def test_a_dtype_of_the_configuration_that_is_none(place, unloaded):
    edit_config(place.model, dtype="int8")
    said = place.refuse()
    assert "config.json: dtype must be one of bfloat16, float16, float32, got 'int8'" in said


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_tensors_of_a_dtype_that_does_not_run(place, unloaded, dtype, name):
    tensors = tensors_of(place.model)
    key = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    rewrite(place.model, tensors | {key: tensors[key].to(dtype)})
    said = place.refuse()
    assert f"model.safetensors: tensor {key} has dtype {name}" in said and "quantised" in said


NEEDED = {
    "mixtral": "model_type hidden_size vocab_size max_position_embeddings num_hidden_layers "
    "num_local_experts num_experts_per_tok intermediate_size num_attention_heads rope_parameters",
    "deepseek_v2": "moe_intermediate_size n_routed_experts qk_rope_head_dim qk_nope_head_dim "
    "v_head_dim kv_lora_rank intermediate_size",
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    path, _ = tiny_deepseek_v2(tmp_path_factory.mktemp("bad-cli") / "deepseek", n_group=1)
    return give_tokenizer(path)


@pytest.mark.parametrize(
    ("family", "key"), [(family, key) for family in NEEDED for key in NEEDED[family].split()]
)
def test_a_configuration_without_a_needed_key(place, deepseek, unloaded, family, key):
    if family == "deepseek_v2":
        shutil.rmtree(place.model)
        shutil.copytree(deepseek, place.model)
    file = place.model / "config.json"
    config = json.loads(file.read_text())
    del config[key]
    file.write_text(json.dumps(config))
    said = place.refuse()
    named = "rope_theta" if key == "rope_parameters" else key
    assert f"{file}: key " in said and named in said and " missing" in said


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": 5}'])
def test_a_configuration_that_is_none(place, unloaded, text):
    (place.model / "config.json").write_text(text)
    assert f"{place.model / 'config.json'}" in place.refuse()


def test_a_checkpoint_without_tokenizer(place, unloaded):
    for path in place.model.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer" in place.refuse()


# The requests


def test_rows_that_cannot_be_served_are_error_lines_and_the_others_run(place):
    context = json.loads((place.model / "config.json").read_text())["max_position_embeddings"]
    place.requests(
        line("long", "x" * (context - 3)),  # and 4 new tokens
        line("empty", ""),
        line("good"),
        line("fits", "x" * (context - 5)),  # the tokenizer adds one
        json.dumps({"id": "nothing said", "messages": []}),
    )
    said = place.run()
    assert said.code == 0 and "3 could not be served" in said.err
    rows = {row["id"]: row for row in place.rows()}
    assert list(rows) == ["long", "empty", "good", "fits", "nothing said"]
    assert f"2 more than the model's context of {context}" in rows["long"]["error"]
    assert rows["empty"]["error"] == "the prompt is empty"
    assert "empty" in rows["nothing said"]["error"]
    assert rows["good"]["text"] and rows["fits"]["text"]


@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_an_empty_file(place, unloaded, text):
    (place.path / "in.jsonl").write_text(text)
    said = place.refuse()
    assert f"{place.path / 'in.jsonl'}" in said and "no request" in said


def test_no_file(place, unloaded):
    (place.path / "in.jsonl").unlink()
    assert f"cannot read {place.path / 'in.jsonl'}: No such file" in place.refuse()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"id": "g", "prompt": "x"', "not JSON"),
        ("hello", "not JSON"),
        ('{"id": "g"}', '"prompt"'),
        ('{"prompt": "x"}', '"id" is missing'),
        ('{"id": "g", "prompt": "x", "max_tokens": 0}', "max_tokens"),
    ],
)
def test_malformed_json_on_line_7(place, unloaded, bad, says):
    place.requests(*(line(id) for id in "abcdef"), bad, line("h"))
    said = place.refuse()
    assert f"{place.path / 'in.jsonl'}:7: " in said and says in said


def test_duplicate_ids(place, unloaded):
    place.requests(line("a"), line("b"), line("a"))
    said = place.refuse()
    assert "in.jsonl:3: id 'a' was used on line 1 already" in said


# The output


def test_an_output_whose_folder_is_not_there(place, unloaded):
    said = place.refuse(output="no/such/out.jsonl")
    assert f"{place.path / 'no/such'} is no folder: make it first" in said


def test_an_output_that_is_a_folder(place, unloaded):
    (place.path / "folder").mkdir()
    said = place.refuse(output="folder")
    assert str(place.path / "folder") in said and "choose another" in said


def test_an_output_that_exists(place, unloaded):
    (place.path / "out.jsonl").write_text("precious")
    said = place.refuse()
    assert f"{place.path / 'out.jsonl'} exists already: choose another --output" in said


def test_an_unfinished_output_of_another_job(place, unloaded):
    partial = place.path / "out.jsonl.partial"
    partial.write_text('{"job": "another"}\n{"id": 1, "text": "precious"}\n')
    assert f"{partial} belongs to another job" in place.refuse()


@contextmanager
def _without_rights() -> Iterator[None]:
    """Root may write everywhere, so be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_an_output_in_a_closed_folder(checkpoint, capsys, unloaded):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to nobody
        place = Place(Path(name), checkpoint, capsys)
        Path(name).chmod(0o755)
        closed = place.path / "closed"
        closed.mkdir(mode=0o555)
        with _without_rights():
            said = place.refuse(output="closed/out.jsonl")
        assert f"{closed / 'out.jsonl'} may not be written: choose another place" in said


@pytest.mark.parametrize("flag", ["--timeline"])
def test_a_second_output_that_cannot_be_written(place, unloaded, flag):
    said = place.refuse(flag, str(place.path / "no/such/t.json"))
    assert flag in said and "is no folder" in said


# Flags and plans


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("--omega", "1.5", "1"),
        ("--omega", "-0.1", "0"),
        ("--omega", "nan", "'nan' is no number"),
        ("--omega", "half", "'half' is no number"),
        ("--B", "0", "1"),
        ("--b-a", "0", "1"),
        ("--B", "many", "integer"),
        ("--max-tokens", "0", "1"),
        ("--fetch", "some", "'all', 'routed'"),
        ("--schedule", "best", "known: module"),
        ("--s-expert", "8 potatoes", "'8 potatoes'"),
        ("--gpu-memory", "-1GiB", "'-1GiB'"),
        ("--host-memory", "lots", "'lots'"),
        ("--device", "tpu", "'cpu', 'cuda'"),
        ("--dtype", "int4", "'float32', 'bfloat16', 'float16'"),
    ],
)
def test_flags_out_of_range(place, unloaded, flag, value, limit):
    said = " ".join(place.refuse(flag, value).replace("│", " ").split())
    assert f"{flag}" in said and limit in said.partition(flag)[2]


def test_a_device_that_is_not_there(place, unloaded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in place.refuse("--device", "cuda", code=1)


@pytest.mark.parametrize(
    ("flags", "line", "limit"),
    [
        (("--gpu-memory", "100KiB"), "gpu memory", "97.00 KiB"),
        (("--host-memory", "10MiB"), "host memory", "10.00 MiB"),
        (("--gpu-memory", "4MiB", "--kv-slots", "5000"), "gpu memory", "3.88 MiB"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_loads(
    place, unloaded, flags, line, limit
):
    said = place.refuse(*flags, code=3)
    (message,) = [x for x in said.splitlines() if x.startswith("moegen: does not fit")]
    assert f"does not fit {line}" in message
    assert "too much" in message and "Try " in message
    assert limit in message


# While it runs


def command(place: Place, *flags: str) -> list[str]:
    run = "from moegen.cli import main; main()"
    return [sys.executable, "-c", run, *place.argv(*flags)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def many(place: Place) -> dict[str, int]:
    """Requests and their lengths: some end one after the other, others not for a long while."""
    lengths = {f"r{i}": 10 * i + 1 if i < 10 else 8000 for i in range(20)}
    edit_config(place.model, eos_token_id=None, max_position_embeddings=8192)  # none ends early
    (place.model / "generation_config.json").unlink()
    place.requests(*(line(id, max_tokens=n) for id, n in lengths.items()))
    return lengths


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_job_that_is_stopped_keeps_its_rows(place, signum, code):
    lengths, partial = many(place), place.path / "out.jsonl.partial"
    process = subprocess.Popen(
        command(place),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Who ignores a signal hands that down to its children, as a shell does in the background.
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),
    )
    until = time.monotonic() + 120
    while not partial.exists() or partial.read_text().count("\n") < 4:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err and out == ""
    assert err.splitlines()[-1] == f"moegen: stopped. Rows finished so far are in {partial}."
    header, *rows = place.rows(partial.name)
    assert list(header) == ["job"]
    assert 3 <= len(rows) < len(lengths)
    assert all(row["completion_tokens"] == lengths[row["id"]] for row in rows)
    assert sorted(p.name for p in place.path.iterdir()) == ["in.jsonl", "model", partial.name]


def test_no_space_left(place):
    """A limit on the size of files stands in for a full disk."""
    place.requests(*(line(f"{i}" + 200 * "x", max_tokens=i + 1) for i in range(20)))
    limit = 2000
    done = subprocess.run(
        command(place),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    partial = place.path / "out.jsonl.partial"
    last = done.stderr.splitlines()[-1]
    assert f"cannot write {place.path / 'out.jsonl'}: File too large" in last
    assert f"Rows finished so far are in {partial}." in last
    *whole, _ = partial.read_text().splitlines()
    assert len([json.loads(x) for x in whole]) > 2
    assert sorted(p.name for p in place.path.iterdir()) == ["in.jsonl", "model", partial.name]
