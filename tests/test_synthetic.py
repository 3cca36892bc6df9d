"""What ``Engine.execute`` refuses, and what its Timeline says about the weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import tiny_mixtral  # noqa: E402

from moegen.errors import InvalidInput  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.model import ModelSpec  # noqa: E402
from moegen.graph.strategy import Strategy  # noqa: E402

pytestmark = pytest.mark.cpu
S = Strategy(B=2, b_a=1, b_e=4, omega=0.5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path, _ = tiny_mixtral(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    with Engine.from_pretrained(path, device="cpu", dtype="float32") as e:
        yield e


def other(spec, **keys):
    return ModelSpec.from_config(spec.hf | keys, name="another")


@pytest.mark.parametrize(
    ("keys", "differs"),
    [
        ({"dtype": "bfloat16"}, "dtype is bfloat16 in the graph and float32 in the engine"),
        ({"vocab_size": 256}, "vocab is 256 in the graph and 128 in the engine"),
        ({"hidden_size": 128}, "hidden is 128 in the graph and 64 in the engine"),
        ({"num_hidden_layers": 1}, "n_layers is 1 in the graph and 2 in the engine"),
        ({"num_local_experts": 4}, "layer 0 has other sizes"),
        ({"intermediate_size": 64}, "layer 0 has other sizes"),
        ({"num_key_value_heads": 4}, "layer 0 has other sizes"),
    ],
)
def test_a_graph_of_another_model_is_refused(engine, keys, differs):
    g = build(other(engine.model, **keys), S, kv_len=5)
    with pytest.raises(InvalidInput, match=f"graph is of another .*: {differs}; build .* of eng"):
        engine.execute(g)


def test_the_same_sizes_under_another_name_run(engine):
    assert engine.execute(build(other(engine.model), S, kv_len=5), steps=2).steps == (0, 1)


def test_an_unrolled_graph_is_refused(engine):
    g = build(engine.model, S, kv_len=5)
    with pytest.raises(InvalidInput, match="unrolled to 3 steps: .* with steps=3"):
        engine.execute(g.unroll(3))


def test_a_timeline_says_how_the_weights_lay(engine, monkeypatch):
    g = build(engine.model, S, kv_len=5)
    meta = engine.execute(g).meta
    assert meta["pinned"] is False and meta["notes"] == []
    monkeypatch.setattr(engine.weights, "notes", ["weights are not pinned"])
    assert engine.execute(g).meta["notes"] == ["weights are not pinned"]
