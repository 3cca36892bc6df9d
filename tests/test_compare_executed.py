"""A run on CPU lanes goes through the whole comparison, from the machine's rates to the file."""

from __future__ import annotations

import json

import matplotlib
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import give_tokenizer, tiny_deepseek_v2, tiny_mixtral  # noqa: E402

import moegen as mg  # noqa: E402
from moegen.cli import main  # noqa: E402
from moegen.timeline import Timeline  # noqa: E402
from tests.documents import Document  # noqa: E402

matplotlib.use("agg")
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("make", [tiny_mixtral, tiny_deepseek_v2])
def test_an_executed_step_is_explained(make, tmp_path):
    path, _ = make(tmp_path / "tiny")
    with mg.Engine.from_pretrained(path, device="cpu", dtype="float32") as engine:
        s = mg.Strategy(B=8, b_a=2, b_e=16, omega=0.5)
        graph = mg.build(engine.model, s, phase="decode", kv_len=16)
        real = engine.execute(graph, steps=6)
    real.save(tmp_path / "real.json")
    here = mg.HardwareSpec.detect()
    assert real.meta["machine"] == {"gpu_name": "none (CPU lanes)", "cpu_name": here.cpu_name}
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    with pytest.warns(UserWarning, match="another machine than the run: the GPU there is 'RTX A50"):
        result = mg.compare(cost, Timeline.load(tmp_path / "real.json"))
    assert result.measured_on.endswith(f"{here.cpu_name}, {real.meta['date']}")
    # A tiny model on CPU lanes is not like c2 at all; the sums hold all the same.
    assert abs(result.error) > 0.1
    period_s = result.measured_period_s
    assert abs(result.parts["seconds"].sum() - result.error_s) <= 1e-9 * period_s
    cost_s = result.parts.loc["task cost", "seconds"]
    assert abs(result.task_cost["seconds"].sum() - cost_s) <= 1e-9 * period_s
    assert set(result.by_op.index) == {t.id.op for t in graph}
    assert result.by_resource["measured_s"].gt(0).all()
    frame = result.to_frame()
    assert len(frame) == 6 * len(graph) and frame["counted"].sum() == 4 * len(graph)
    assert str(result) and result._repr_html_()
    result.plot()
    result.to_perfetto(tmp_path / "both.json")
    # Predicted by its own mean durations nothing is left but the noise between steps.
    mean = frame[frame["counted"]].groupby("op")["measured_s"].mean().to_dict()
    own = mg.compare(mg.CostModel.fixed(mean), real)
    assert np.abs(own.by_op["error"]).max() < 1e-9
    assert abs(own.parts["seconds"].sum() - own.error_s) <= 1e-9 * period_s


def test_the_file_of_a_run_is_compared(tmp_path, capsys):
    path, _ = tiny_mixtral(tmp_path / "tiny")
    give_tokenizer(path)
    asked = tmp_path / "in.jsonl"
    lines = [{"id": i, "prompt": "abc" * (i + 1), "max_tokens": 6 + 2 * i} for i in range(4)]
    asked.write_text("\n".join(map(json.dumps, lines)))
    words = f"run --model {path} --input {asked} --output {tmp_path}/out.jsonl --device cpu"
    for line in (
        f"{words} --timeline {tmp_path}/real.json",
        f"compare {tmp_path}/real.json --hw c2 --json",
    ):
        with pytest.raises(SystemExit) as exit_:
            main(line.split())
        assert not exit_.value.code
    result = json.loads(capsys.readouterr().out)
    # Rows grow and end: each step is predicted on its own.
    assert sum(part["seconds"] for part in result["parts"]) == pytest.approx(
        result["predicted_period_s"] - result["measured_period_s"]
    )
    first, *_, last = Timeline.load(tmp_path / "real.json").shapes
    assert first != last


def test_the_pair_of_the_quickstart_is_of_one_graph(tmp_path, monkeypatch, capsys):
    path, _ = tiny_mixtral(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    lines = Document("docs/quickstart.md").moegen
    first = next(i for i, line in enumerate(lines) if "--timeline predicted.json" in line)
    simulate, bench, compare = lines[first : first + 3]
    assert "--profile here.json" in simulate and "--timeline real.json" in bench
    for line in (
        simulate.replace("--profile here.json", "--hw c2"),
        f"{bench} --device cpu --steps 3",
        compare,
    ):
        with pytest.raises(SystemExit) as exit_:
            main(line.replace("~/.cache/moegen/demo-moe", str(path)).split()[1:])
        said = capsys.readouterr()
        assert not exit_.value.code, said.err
    assert "task cost" in said.out and "Measured on CPU lanes (no GPU)" in said.out
    assert "warning: the prediction is of another machine" in said.err
