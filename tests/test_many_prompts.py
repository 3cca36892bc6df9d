"""Five hundred prompts of mixed length: the process stays within the memory that was planned."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
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


def run(place: Path, checkpoint: Path, *flags: str) -> tuple[dict, int | None]:
    """The summary of a job in a process of its own, and the most memory it was seen to hold."""
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
    peak = None
    with (place / "said.json").open("w") as out:
        process = subprocess.Popen(argv, env=env, stdout=out)
        while process.poll() is None:
            peak = _peak(process.pid) or peak
            time.sleep(0.01)
    assert process.returncode == 0
    return json.loads((place / "said.json").read_text()), peak


def _peak(pid: int) -> int | None:
    """Most bytes that a process has held since it began; None where the system does not say.

    Not ``ru_maxrss``: Linux counts there what the parent held when it forked.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def test_the_peak_is_within_the_ledger(tmp_path, checkpoint):
    summary, seen = run(tmp_path, checkpoint)
    planned, peak = (summary["memory"]["host"][key] for key in ("in_host_bytes", "peak_bytes"))
    assert summary["served"] == ROWS
    assert summary["completion_tokens"] == ROWS * NEW
    assert planned / 2 < peak < 1.1 * planned
    if sys.platform == "linux":
        assert peak == pytest.approx(seen, rel=0.02)
