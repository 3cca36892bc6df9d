"""What is wrong is refused by name, wherever it comes in: arguments, files, configurations."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from handmade import task
from small_models import DEEPSEEK, MIXTRAL, deepseek, mixtral, two_layers

import moegen
from moegen.errors import GraphError, InvalidInput, MachineError
from moegen.graph.build import build
from moegen.graph.checks import number, whole, wholes
from moegen.graph.hardware import HardwareSpec
from moegen.graph.hf_families import FAMILIES
from moegen.graph.model import ModelSpec
from moegen.graph.shape import Shape
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.task import TaskGraph, Work
from moegen.graph.workload import Workload
from moegen.sim.bounds import critical_path_s
from moegen.sim.cost import CostModel
from moegen.sim.engine import simulate
from moegen.timeline import Timeline
from moegen.units import parse_rate

S = Strategy(B=4, b_a=2, b_e=8, omega=0.5)
NO_COUNTS = [math.nan, math.inf, -math.inf, "5", 1.5, True, None, [1], -1]


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
def test_counts(value):
    with pytest.raises(InvalidInput, match="rows must be a whole number of at least 0, got"):
        whole(value, "rows")


def test_counts_that_are_fine():
    assert [whole(x, "n") for x in (3, np.int64(3), 3.0, np.float32(3))] == [3, 3, 3, 3]
    assert all(type(whole(x, "n")) is int for x in (np.int64(3), 3.0))
    assert wholes(np.array([1, 2]), "n") == wholes([1, 2.0], "n") == (1, 2)
    assert number(np.float32(0.5), "x") == number(0.5, "x", above=0, at_least=None) == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.5", None, True, 10**400], ids=str)
def test_numbers(value):
    with pytest.raises(InvalidInput, match="omega must be a finite number, got"):
        S.with_(omega=value)


@pytest.mark.parametrize("value", [10**30, *(x for x in NO_COUNTS if x is not None)], ids=repr)
@pytest.mark.parametrize(("phase", "name"), [("decode", "kv_len"), ("prefill", "prompt_len")])
def test_uniform_lengths(phase, name, value):
    with pytest.raises(InvalidInput, match=f"{name} must be "):
        build(mixtral(), S, phase, **{name: value})


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([math.nan], r"lengths\[0\] must be a whole number"),
        (["a"], r"lengths\[0\] must be a whole number of at least 0, got 'a'"),
        ([3, None], r"lengths\[1\] must be a whole number of at least 0, got None"),
        ([3, 10**30], r"lengths\[1\] must be at most"),
        ([True], r"lengths\[0\]"),
        ("ab", "lengths must be a list of whole numbers, got 'ab'"),
        (5, "lengths must be a list of whole numbers, got 5"),
        ([], "lengths is empty"),
    ],
)
def test_lengths(lengths, says):
    with pytest.raises(InvalidInput, match=says):
        build(mixtral(), S, lengths=lengths)


@pytest.mark.parametrize("value", [0, -5, math.nan, "7", True, 1.5])
def test_slot_tokens(value):
    with pytest.raises(InvalidInput, match="kv_slot_tokens must be a whole number of at least 1"):
        build(mixtral(), S, kv_len=3, kv_slot_tokens=value)


def test_rows_too_long_to_count():
    with pytest.raises(InvalidInput, match="too long: the FLOPs of their attention"):
        build(mixtral(), S, "prefill", prompt_len=2**33)


@pytest.mark.parametrize("n", [math.nan, 1.5, "2", None, True, 0])
def test_unroll(n):
    with pytest.raises(InvalidInput, match="number of steps must be a whole number of at least 1"):
        two_layers().unroll(n)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (((math.nan,), (1,)), r"past\[0\]"),
        (((1.5,), (1,)), r"past\[0\]"),
        (((1,), ("1",)), r"new\[0\]"),
        (((1,), (-1,)), r"new\[0\]"),
        ((5, (1,)), "past must be a list"),
        (((1,), (1,), {0: (1.5,)}), r"expert_tokens\[0\]\[0\]"),
        (((1,), (1,), {"0": (1,)}), "a layer of expert_tokens"),
        (((1,), (1,), [(1,)]), "expert_tokens must map"),
    ],
)
def test_shapes(arguments, says):
    with pytest.raises(InvalidInput, match=says):
        Shape(*arguments)


@pytest.mark.parametrize(
    ("phase", "shape", "says"),
    [
        ("decode", Shape((9,) * 4, (1, 2, 1, 1)), "a decode step adds 1 token .* adds 2"),
        ("prefill", Shape((0, 0, 3, 0), (9,) * 4), "begins with empty rows, .* one of 3 tokens"),
        ("decode", Shape((9,) * 4, (1,) * 4, {0: (4, 4)}), "counts 2 experts and the layer has 4"),
        ("decode", Shape((9,) * 4, (1,) * 4, {0: (4, 2, 1, 0)}), "sum to 7, and 4 .* are 8"),
        ("decode", Shape((9,) * 4, (1,) * 4, {7: (8, 0, 0, 0)}), "layer 7, .* no routed experts"),
    ],
)
def test_shapes_that_no_step_has(phase, shape, says):
    size = {"kv_len": 9} if phase == "decode" else {"prompt_len": 9}
    with pytest.raises(GraphError, match=says):
        build(mixtral(), S, phase, **size).bind(shape)


def test_dense_layers_have_no_experts_to_count():
    with pytest.raises(GraphError, match="layer 0, which has no routed experts"):
        build(deepseek(), S, kv_len=9).bind(Shape((9,) * 4, (1,) * 4, {0: (12, *[0] * 7)}))


def test_more_active_experts_than_tasks():
    one = build(mixtral(num_local_experts=8), S.with_(B=1, fetch="routed"), kv_len=9)
    counts = (1, 1, 0, 0, 0, 0, 0, 0)
    assert one.bind(Shape((9,), (1,), {0: counts})).shape.expert_tokens == {0: counts}
    prefill = build(mixtral(), S.with_(fetch="routed", expert_group=2), "prefill", prompt_len=2)
    few = TaskGraph(
        [t for t in prefill if not (t.id.op == "expert" and t.id.expert > 0)],
        [],
        phase="prefill",
        model=prefill.model,
        strategy=prefill.strategy,
        layout=prefill.layout,
    )
    with pytest.raises(GraphError, match="layer 0 has 4 active experts and the graph tasks for 2"):
        few.bind(Shape((0,) * 4, (2,) * 4, {1: (4, 4, 4, 4)}))


@pytest.mark.parametrize("duplex", [0, -1, math.nan, "x", True])
def test_duplex(duplex):
    with pytest.raises(InvalidInput, match="duplex must be a finite number above 0"):
        CostModel.fixed({"a": 1}, duplex=duplex)


@pytest.mark.parametrize("seconds", ["1", True, None])
def test_durations(seconds):
    with pytest.raises(InvalidInput, match="the duration of a must be a finite number"):
        CostModel.fixed({"a": seconds})


def test_no_copy_is_faster_than_host_memory():
    hw = HardwareSpec.from_name("h200").with_(
        h2d_bytes_per_s=450e9, d2h_bytes_per_s=450e9, duplex_bytes_per_s=450e9,
        zero_copy_bytes_per_s=450e9, host_bytes_per_s=120e9, cpu_attn_bytes_per_s=400e9,
    )  # fmt: skip
    cost = CostModel.roofline(hw)
    up, down = Work(h2d_bytes=120e9), Work(d2h_bytes=120e9)
    for op, lane, work in (
        ("copy_expert", "BULK", up),
        ("fetch_kv", "KV", up),
        ("send_qkv", "ACT", down),
        ("attn_cpu", "CPU", Work(host_bytes=120e9)),
    ):
        assert cost.seconds(task(op, lane, work)) >= 1.0
    g = build(ModelSpec.from_pretrained("mixtral-8x7b"), S.with_(b_e=64), kv_len=512)
    host_s = sum(cost.estimate(t).demands.get("host_memory", 0) for t in g) / 120e9
    assert simulate(g, cost).makespan_s >= host_s
    bulk_s = sum(t.work.h2d_bytes for t in g if t.lane == "BULK") / 120e9
    assert simulate(g, cost, shared=False).makespan_s >= bulk_s
    assert critical_path_s(g, cost) >= bulk_s


def put(path, value):
    """An edit of plain data: ``value`` at ``path``."""

    def edit(data):
        *most, last = path
        for key in most:
            data = data[key]
        data[last] = value

    return edit


GRAPH_DAMAGE = [
    (put(["structure", "tasks", 0, "lane"], "DISK"), "'DISK' is not a valid Lane"),
    (put(["structure", "edges", 0, 2], "MAGIC"), "'MAGIC' is not a valid EdgeKind"),
    (put(["structure", "edges", 0, 0], -1), "the source of an edge"),
    (put(["structure", "edges", 0, 0], 10**6), "IndexError"),
    (put(["structure", "n_steps"], "x"), "n_steps must be a whole number"),
    (put(["structure", "phase"], 5), "a phase must be"),
    (put(["structure", "tasks", 0, "id", 1], 5), "a phase must be"),
    (put(["structure", "tasks", 0, "id", 2], "x"), "the step of copy_rows"),
    (put(["structure", "tasks", 0, "id", 0], 3), "an op must be text"),
    (put(["structure", "tasks", 0, "writes", 0, 1], "x"), "the index of rows"),
    (put(["structure", "rings", 0, "slots"], "x"), "slots of .* must be a whole number"),
    (put(["structure", "layout", "cpu_rows"], None), "cpu_rows must be a whole number"),
    (put(["structure", "layout", "micro_batches"], "ab"), "micro_batches must be a list"),
    (put(["structure"], 5), "TypeError"),
    (put(["work", 1, "flops"], math.nan), "flops must be a finite number"),
    (put(["work", 1, "flops"], -1), "flops must be a finite number of at least 0"),
    (put(["work", 1, "launches"], 0.5), "launches must be a whole number"),
    (put(["shape"], 5), "the shape is damaged"),
    (put(["shape", "past"], [["x", 2]]), r"past\[0\]"),
    (put(["shape", "past"], [[1, 10**12]]), "the rows of a shape must be at most"),
    (put(["strategy", "B"], "x"), "B must be a whole number"),
    (put(["model"], {"name": "m", "config": {"model_type": "llama"}}), "'llama' is not supported"),
]


@pytest.mark.parametrize(("edit", "says"), GRAPH_DAMAGE, ids=[s for _, s in GRAPH_DAMAGE])
def test_damaged_graphs(tmp_path, edit, says):
    data = two_layers().to_dict()
    edit(data)
    (tmp_path / "g.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match=f"^the task graph is damaged: .*{says}"):
        TaskGraph.from_json(tmp_path / "g.json")


def timeline():
    return simulate(two_layers(), CostModel.roofline(HardwareSpec.from_name("h200")), steps=2)


TIMELINE_DAMAGE = [
    (put(["start_s", 0], "soon"), "start_s must hold numbers"),
    (put(["end_s", 0], "0.5"), "end_s must hold numbers"),
    (put(["end_s", 0], None), "end_s must hold numbers"),
    (put(["end_s", 0], [1]), "end_s must be a list of numbers"),
    (put(["ready_s"], 5), "ready_s has shape"),
    (put(["ids", 0, 2], "x"), "the step of copy_rows"),
    (put(["ids", 0], 5), "TypeError"),
    (put(["ids"], None), "TypeError"),
    (put(["tokens_actual", 0], "x"), "tokens_actual must hold numbers"),
    (put(["meta"], "x"), "ValueError"),
    (put(["meta"], {"shapes": [5]}), "the shape is damaged"),
    (put(["meta"], {"shapes": [Shape((9, 9), (1, 1)).to_dict()]}), "1 shapes for 2 steps"),
    (put(["graph"], 5), "not a task graph"),
    (put(["source"], "guessed"), "source must be"),
]


@pytest.mark.parametrize(("edit", "says"), TIMELINE_DAMAGE, ids=[s for _, s in TIMELINE_DAMAGE])
def test_damaged_timelines(tmp_path, edit, says):
    data = timeline().to_dict()
    edit(data)
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match=f"^the timeline is damaged: .*{says}"):
        Timeline.load(tmp_path / "t.json")


@pytest.mark.parametrize(("load", "what"), [(TaskGraph.from_json, "task graph"), (Timeline.load, "timeline")])  # fmt: skip # noqa: E501
def test_files_that_cannot_be_read(tmp_path, load, what):
    for content, says in (
        (b"[" * 100_000, f"the {what} is damaged: .* is nested too deeply"),
        (b'{"a": "\xff"}', f"the {what} is damaged: .* is not UTF-8 text"),
        (b"{", "is not JSON: line 1"),
    ):
        (tmp_path / "f.json").write_bytes(content)
        with pytest.raises(InvalidInput, match=says):
            load(tmp_path / "f.json")
    for path in (tmp_path, tmp_path / "none", "\0", None):
        with pytest.raises(InvalidInput, match=f"cannot read the {what}"):
            load(path)


def test_files_that_cannot_be_written(tmp_path):
    run = timeline()
    for write in (run.save, run.to_perfetto, run.graph.to_json):
        with pytest.raises(InvalidInput, match="cannot write .*: No such file or directory"):
            write(tmp_path / "nowhere" / "f.json")
        with pytest.raises(InvalidInput, match="cannot write .*: Is a directory"):
            write(tmp_path)
        with pytest.raises(InvalidInput, match="cannot write"):
            write("\0")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file, run = tmp_path / "t.json", timeline()
    file.write_text("old")
    run.meta["what"] = object()
    with pytest.raises(InvalidInput, match="cannot write the timeline: .* not JSON"):
        run.save(file)
    run.meta.clear()

    def half(self, data):
        with open(self, "wb") as f:
            f.write(data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(Path, "write_bytes", half)
        with pytest.raises(MachineError, match="No space left on device"):
            run.save(file)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    link = tmp_path / "link.json"
    link.symlink_to(file)
    run.save(link)
    assert link.is_symlink() and Timeline.load(file).to_dict() == run.to_dict()
    run.save(os.devnull)
    assert not Path(os.devnull).is_file()  # still the device


@pytest.mark.parametrize(
    ("line", "says"),
    [("[" * 100_000, ":1: not JSON .*nested too deeply"), ("\x00", ":1: not JSON")],
)
def test_requests(tmp_path, line, says):
    (tmp_path / "in.jsonl").write_text(line)
    with pytest.raises(InvalidInput, match=says):
        Workload.from_jsonl(tmp_path / "in.jsonl", count_tokens=len)


@pytest.mark.parametrize("count", [math.nan, "3", None, True, 0])
def test_token_counts(tmp_path, count):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt": "a"}\n')
    with pytest.raises(InvalidInput, match="the number of prompt tokens must be a whole"):
        Workload.from_jsonl(tmp_path / "in.jsonl", count_tokens=lambda _: count)
    with pytest.raises(InvalidInput, match="gen_len must be a whole"):
        Workload.from_jsonl(tmp_path / "in.jsonl", count_tokens=len, gen_len=count)


@pytest.mark.parametrize("groups", [5, (5,), ((1, 2),), ((1, 1, 10**30),), ("abc",)])
def test_workloads(groups):
    with pytest.raises(InvalidInput):
        Workload(groups)


@pytest.mark.parametrize("data", [{}, {"groups": 5, "name": "w"}, {"groups": [5], "name": "w"}])
def test_workloads_as_dicts(data):
    with pytest.raises(InvalidInput, match="a workload as a dict"):
        Workload.from_dict(data)


def test_plans():
    with pytest.raises(InvalidInput, match="decode must be a Strategy, got 5"):
        Plan(prefill=S, decode=5)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model_type|family", {"model_type": ["mixtral"]}),
        ("rms_norm_eps", {"rms_norm_eps": "x"}),
        ("rms_norm_eps", {"rms_norm_eps": None}),
        ("rms_norm_eps", {"rms_norm_eps": -1e-6}),
        ("factor", {"rope_scaling": YARN | {"factor": "x"}}),
        ("beta_fast", {"rope_parameters": YARN | {"beta_fast": -1}}),
        ("mscale", {"rope_parameters": YARN | {"mscale": "x"}}),
        ("original_max", {"rope_parameters": YARN | {"original_max_position_embeddings": "x"}}),
        ("rope_theta", {"rope_parameters": YARN | {"rope_theta": 1}}),
        ("rope_type", {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}}),
        ("rope_theta", {"rope_theta": True}),
        ("routed_scaling_factor", {"routed_scaling_factor": None}),
        ("routed_scaling_factor", {"routed_scaling_factor": "2"}),
        ("n_group", {"n_group": "x"}),
        ("head_dim", {"head_dim": 15}),
        ("mlp_layer_types", {"mlp_layer_types": [["sparse"], "dense"]}),
        ("eos_token_id", {"eos_token_id": ["x"]}),
    ],
)
def test_configurations(tmp_path, key, change):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | change))
    with pytest.raises(InvalidInput, match=rf"config\.json: .*({key})"):
        ModelSpec.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ("qwen3_moe", {"mlp_only_layers": "0", "moe_intermediate_size": 8}, "mlp_only_layers"),
    ],
)
def test_configurations_of_other_families(family, change, says):
    base = DEEPSEEK if family == "deepseek_v2" else MIXTRAL
    with pytest.raises(InvalidInput, match=says):
        ModelSpec.from_config(base | {"model_type": family} | change)


def test_a_configuration_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match=r"config\.json cannot be read as JSON: .* too deeply"):
        ModelSpec.from_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="named by text or a path, got 5"):
        ModelSpec.from_pretrained(5)


@pytest.mark.parametrize("n", [math.nan, "2", 1.5])
def test_layers_of_a_copy(n):
    with pytest.raises(InvalidInput, match="n_layers must be a whole number"):
        mixtral().with_(n_layers=n)


def test_what_a_configuration_leaves_out():
    def without(config, *keys):
        return ModelSpec.from_config({k: v for k, v in config.items() if k not in keys})

    assert without(DEEPSEEK, "n_shared_experts").layers[1].shared_intermediate == 2 * 32
    assert without(DEEPSEEK, "q_lora_rank").layers[1].attention.q_lora_rank == 1536
    assert deepseek().layers[1].attention.q_lora_rank is None  # null is said, not left out
    assert deepseek(n_shared_experts=None).layers[1].shared_intermediate == 0
    eight = MIXTRAL | {"num_attention_heads": 8}
    assert without(eight, "num_key_value_heads").layers[0].attention.n_kv_heads == 8
    assert without(MIXTRAL).eos_token_ids == (2,)
    assert mixtral(eos_token_id=None).eos_token_ids == ()


def test_generation_settings_say_which_tokens_end(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelSpec.from_pretrained(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert ModelSpec.from_pretrained(tmp_path).eos_token_ids == (7,)


# Keys that moegen reads and does without; transformers has a default for each.
OPTIONAL = (
    "num_key_value_heads", "head_dim", "q_lora_rank", "n_shared_experts", "first_k_dense_replace",
    "decoder_sparse_step", "sliding_window", "use_sliding_window", "max_window_layers",
    "tie_word_embeddings", "attention_bias", "qkv_bias", "use_qk_norm", "lm_head_bias",
    "eos_token_id", "rms_norm_eps", "routed_scaling_factor", "hidden_act",
)  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"kimi_k2"}))
def test_defaults_are_those_of_transformers(family):
    auto = pytest.importorskip("transformers").models.auto.configuration_auto
    theirs = auto.CONFIG_MAPPING[family]
    ours = FAMILIES[family].defaults
    # What moegen takes where neither the configuration nor the family says anything.
    common = {
        "decoder_sparse_step": 1, "first_k_dense_replace": 0, "use_sliding_window": False,
        "tie_word_embeddings": False, "attention_bias": False, "qkv_bias": True,
        "use_qk_norm": False, "lm_head_bias": False, "hidden_act": "silu",
        "routed_scaling_factor": 1.0,
    }  # fmt: skip
    if family == "gpt_oss":
        common["attention_bias"] = True
    runs = {"mixtral": 1e-5, "deepseek_v2": 1e-6}
    for key in OPTIONAL:
        if key == "num_key_value_heads" and FAMILIES[family].attention == "mla":
            continue  # all heads share the latent
        if not hasattr(theirs, key) or isinstance(getattr(theirs, key), property):
            continue
        if key in ("rms_norm_eps", "routed_scaling_factor", "hidden_act") and family not in runs:
            continue  # read only by what runs
        mine = runs.get(family) if key == "rms_norm_eps" else ours.get(key, common.get(key))
        assert mine == getattr(theirs, key), key
    assert ours.get("partial_rotary_factor") == (0.5 if family == "glm4_moe" else None)


def test_the_version_without_an_installed_package():
    code = (
        "import importlib.metadata as m\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "import moegen; print(moegen.__version__)"
    )
    root = Path(moegen.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "0+unknown", done.stderr


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts", "hidden_size"])
def test_absurd_counts_are_refused_before_anything_is_made_of_them(key):
    with pytest.raises(InvalidInput, match=f"{key} must be at most"):
        ModelSpec.from_config(MIXTRAL | {key: 10**30}, "absurd")


@pytest.mark.parametrize("text", ["25GB/s", " 25 gb/S ", "25e9", 25e9, "2.5e10/s"])
def test_a_rate_is_a_size_a_second(text):
    assert parse_rate(text) == 25e9


@pytest.mark.parametrize("text", ["1e300GB/s", "1e400", "fast", "25GB/s/s", "-1GB/s", "25GB/min"])
def test_what_is_no_rate(text):
    with pytest.raises(InvalidInput, match="is not a size"):
        parse_rate(text)
