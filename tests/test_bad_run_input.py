"""What an engine refuses by name: prompts, limits, plans, devices, graphs, checkpoint files."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from small_models import deepseek, mixtral  # noqa: E402
from tiny import edit_config, tiny_mixtral  # noqa: E402

from moegen.errors import InvalidInput  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.families import family_for  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.shape import Shape  # noqa: E402
from moegen.graph.strategy import Strategy  # noqa: E402

pytestmark = pytest.mark.cpu
S = Strategy(B=2, b_a=1, b_e=4, omega=0.5)


@pytest.fixture(scope="module")
def engine():
    with Engine.random(mixtral(), device="cpu", dtype="float32") as e:
        e.tokenizer = lambda text: {"input_ids": list(text.encode())}
        yield e


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (math.nan, "max_new_tokens must be a whole number of at least 1, got nan"),
        (1.5, "max_new_tokens must be a whole number of at least 1, got 1.5"),
        (None, "max_new_tokens .* got None"),
        ("2", "max_new_tokens .* got '2'"),
        (True, "max_new_tokens .* got True"),
        (["a", 1], "prompt 0: max_new_tokens .* got 'a'"),
        ([1, 2.5], "prompt 1: max_new_tokens .* got 2.5"),
        ([1], "max_new_tokens has 1 entries for 2 prompts"),
    ],
)
def test_limits(engine, limit, says):
    with pytest.raises(InvalidInput, match=says):
        engine.generate([[5], [6]], limit)


def test_limits_and_prompts_may_be_of_numpy_or_torch(engine):
    engine.tokenizer, kept = None, engine.tokenizer
    wanted = [c.token_ids for c in engine.generate([[5, 6]], 3)]
    engine.generate([np.array([5, 6])], np.int64(3))
    for prompts, limit in (
        ([np.array([5, 6])], np.int64(3)),
        (torch.tensor([[5, 6]]), np.array([3])),
        ([(np.int32(5), 6)], [3]),
    ):
        assert [c.token_ids for c in engine.generate(prompts, limit)] == wanted
    engine.tokenizer = kept


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[1], ["a"]], r"prompt 1\[0\] must be a whole number of at least 0, got 'a'"),
        ([[math.nan]], r"prompt 0\[0\] must be .* got nan"),
        ([[1, 1.5]], r"prompt 0\[1\] must be .* got 1.5"),
        ([[True]], r"prompt 0\[0\] must be .* got True"),
        ([[-1]], r"prompt 0\[0\] must be .* got -1"),
        ([[5, 128]], r"prompt 0 has a token id outside \[0, 128\): 128 at place 1"),
        ([None], "prompt 0 must be a list of whole numbers, got None"),
        ([5], "prompt 0 must be a list of whole numbers, got 5"),
        (None, "prompts must be a list with one entry a prompt, got None"),
        (5, "prompts must be a list"),
        ("hello", "prompts must be a list with one entry a prompt, got 'hello'"),
        (["\ud800"], "prompt 0 is no text: half of a surrogate pair"),
        ([[]], "prompt 0 is empty"),
        ([""], "prompt 0 is empty"),
    ],
)
def test_prompts(engine, prompts, says):
    with pytest.raises(InvalidInput, match=says):
        engine.generate(prompts, 2)


@pytest.mark.parametrize(
    ("forced", "says"),
    [
        ([[500]], r"forced tokens of prompt 0 has a token id outside \[0, 128\): 500"),
        ([[-1]], r"forced tokens of prompt 0\[0\] must be .* got -1"),
        ([[1.5]], r"forced tokens of prompt 0\[0\] must be .* got 1.5"),
        ([None], "forced tokens of prompt 0 must be a list"),
        ([[]], "forced tokens of prompt 0 are empty"),
        (5, "forced must be a list"),
        ([[1], [2]], "forced has 2 entries for 1 prompts"),
    ],
)
def test_forced_tokens(engine, forced, says):
    with pytest.raises(InvalidInput, match=says):
        engine.generate([[5]], 4, forced=forced)


ARGUMENTS = [
    ({"plan": 5}, "plan must be a Plan, .* got 5"),
    ({"plan": None}, "plan must be a Plan, .* got None"),
    ({"plan": {"B": 0}}, "B must be a whole number of at least 1, got 0"),
    ({"threads": 0}, "threads must be a whole number of at least 1, got 0"),
    ({"threads": 1.5}, "threads must be a whole number"),
    ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
    ({"device": "meta"}, "device must be 'cpu' or 'cuda', got 'meta'"),
    ({"device": 1.5}, "device must be 'cpu' or 'cuda', got 1.5"),
    ({"gpu_memory_bytes": math.nan}, "gpu_memory_bytes must be"),
]


@pytest.mark.parametrize(("arguments", "says"), ARGUMENTS, ids=[s for _, s in ARGUMENTS])
def test_arguments_of_an_engine(tmp_path, arguments, says):
    path, _ = tiny_mixtral(tmp_path, num_hidden_layers=1)
    (path / "model.safetensors").unlink()  # refused before weights are looked at
    with pytest.raises(InvalidInput, match=says):
        Engine.from_pretrained(path, **{"device": "cpu"} | arguments)
    with pytest.raises(InvalidInput, match=says):
        Engine.random(mixtral(), **{"device": "cpu"} | arguments)


def test_a_seed():
    with pytest.raises(InvalidInput, match="seed must be a whole number"):
        Engine.random(mixtral(), device="cpu", seed=math.nan)


@pytest.mark.parametrize("steps", [math.nan, 1.5, "2", None, True, 0])
def test_steps(engine, steps):
    with pytest.raises(InvalidInput, match="steps must be a whole number of at least 1"):
        engine.execute(build(engine.model, S, kv_len=5), steps)


def test_graphs_with_nothing_to_run(engine):
    g = build(engine.model, S, kv_len=5).bind(Shape((5, 5), (0, 0)))
    with pytest.raises(InvalidInput, match="every row of the graph's shape has ended"):
        engine.execute(g)
    with pytest.raises(InvalidInput, match="execute takes a TaskGraph, got 5"):
        engine.execute(5)
    with pytest.raises(InvalidInput, match="has no shape"):
        engine.execute(replace(g, shape=None))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "garbage"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{}"),
        ("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
    ],
)
def test_damaged_tokenizers(tmp_path, name, content):
    path, _ = tiny_mixtral(tmp_path, num_hidden_layers=1)
    (path / name).write_text(content)
    with pytest.raises(InvalidInput, match=rf"/{name}: no tokenizer can be made of it"):
        Engine.from_pretrained(path, device="cpu")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rms_norm_eps": "x"}, r"config\.json: rms_norm_eps must be a finite number"),
        ({"head_dim": 15}, r"config\.json: head_dim must be even"),
        ({"model_type": ["mixtral"]}, r"config\.json: family \['mixtral'\] is not supported"),
    ],
)
def test_damaged_configurations(tmp_path, change, says):
    path, _ = tiny_mixtral(tmp_path, num_hidden_layers=1)
    edit_config(path, **change)
    with pytest.raises(InvalidInput, match=says):
        Engine.from_pretrained(path, device="cpu")


def test_an_epsilon_of_zero_stays():
    assert family_for(mixtral(rms_norm_eps=0.0)).eps == 0.0
    assert family_for(mixtral()).eps == 1e-5
    assert family_for(deepseek()).eps == 1e-6
