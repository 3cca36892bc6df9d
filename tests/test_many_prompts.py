"""Five hundred prompts of mixed length: the process stays within the memory that was planned."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
pytest.importorskip("torch")

from tests.tiny import edit_config, give_tokenizer, tiny_mixtral  # noqa: E402

ROOT = Path(__file__).parents[1]
ROWS, LONGEST, NEW = 500, 400, 4
# Two layers of the demo model, their experts a third as wide to save time: enough that weights, KV
# and what lies between operations each outweigh the noise of Python and torch.
WIDTHS = {
    "hidden_size": 576,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "num_local_experts": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path, _ = tiny_mixtral(tmp_path_factory.mktemp("many") / "model", **WIDTHS)
    (path / "generation_config.json").unlink()
    edit_config(path, eos_token_id=None)  # every row goes on to its limit
    return give_tokenizer(path)


def run(place: Path, checkpoint: Path, *flags: str) -> tuple[dict, int]:
    """The summary of a job in a process of its own, and the most memory that it held."""
    lengths = random.Random(0)
    with (place / "in.jsonl").open("w") as file:
        for i in range(ROWS):
            letters = lengths.choices("abcdefgh ", k=lengths.randint(1, LONGEST) - 1)
            file.write(json.dumps({"id": i, "prompt": "x" + "".join(letters)[1:]}) + "\n")
    files = ["--input", str(place / "in.jsonl"), "--output", str(place / "out.jsonl")]
    code = "from moegen.cli import main; main()"
    argv = [sys.executable, "-c", code, "run", "--model", str(checkpoint), *files, "--json"]
    argv += ["--device", "cpu", "--max-tokens", str(NEW), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return json.loads(out), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_the_peak_is_within_the_ledger(tmp_path, checkpoint):
    summary, peak = run(tmp_path, checkpoint)
    planned = summary["memory"]["host"]["in_host_bytes"]
    assert summary["served"] == ROWS
    assert summary["completion_tokens"] == ROWS * NEW
    assert planned / 2 < peak < 1.1 * planned
    assert summary["memory"]["host"]["peak_bytes"] == pytest.approx(peak, rel=0.02)
