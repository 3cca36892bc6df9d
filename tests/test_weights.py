"""The host weight store: every checkpoint layout gives the same bytes; broken ones say why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import edit_config, rewrite, tensors_of, tiny_deepseek_v2, tiny_mixtral  # noqa: E402

from moegen.errors import InvalidInput  # noqa: E402
from moegen.exec.arena import Arena  # noqa: E402
from moegen.exec.checkpoint import Checkpoint  # noqa: E402
from moegen.exec.families import family_for  # noqa: E402
from moegen.exec.layout import Layout  # noqa: E402
from moegen.exec.pinning import Pins, host_buffer  # noqa: E402
from moegen.exec.weights import HostWeights  # noqa: E402
from moegen.graph.model import ModelSpec  # noqa: E402

MAKERS = [tiny_mixtral, tiny_deepseek_v2]


def load(path, dtype=None, **options):
    spec = ModelSpec.from_pretrained(path)
    return HostWeights.load(path, spec, family_for(spec, dtype), **options)


def all_views(store):
    """Every tensor of a store under a name of its own."""
    found = {("head", n): t for n, t in store.head_views().items()}
    for i, layer in enumerate(store.spec.layers):
        found |= {(i, n): t for n, t in store.dense_views(i).items()}
        for e in range(layer.n_experts):
            found |= {(i, e, n): t for n, t in store.expert_views(i, e).items()}
    return found


def assert_same(a, b):
    a, b = all_views(a), all_views(b)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_checkpoint_layouts_load_identically(make, tied, tmp_path):
    stores, count = [], []
    for layout in ("hub", "fused"):
        for sharded in (False, True):
            path, model = make(
                tmp_path / f"{layout}{sharded}",
                seed=3,
                layout=layout,
                sharded=sharded,
                tie_word_embeddings=tied,
            )
            stores.append(load(path, threads=1 + sharded))
            count.append(sum(p.numel() for p in model.parameters()))
    for other in stores[1:]:
        assert_same(stores[0], other)
    assert ("lm_head" in stores[0].head_views()) != tied
    # Nothing is left over, and nothing that the model has is left out.
    assert all(store.notes == [] for store in stores)
    assert {sum(t.numel() for t in all_views(store).values()) for store in stores} == set(count)


def test_tensors_lie_where_the_mathematics_looks_for_them(tmp_path):
    path, model = tiny_mixtral(tmp_path)
    store, state = load(path), model.state_dict()
    w, a = store.dense_views(1), "model.layers.1.self_attn."
    qkv = torch.cat([state[a + f"{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(w["qkv"], qkv)
    assert torch.equal(w["router"], state["model.layers.1.mlp.gate.weight"])
    for e in range(8):
        v = store.expert_views(2, e)
        assert torch.equal(v["gate_up"], state["model.layers.2.mlp.experts.gate_up_proj"][e])
        assert torch.equal(v["down"], state["model.layers.2.mlp.experts.down_proj"][e])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_converted_as_torch_does(dtype, tmp_path):
    path, _ = tiny_mixtral(tmp_path)
    half, full = all_views(load(path, dtype)), all_views(load(path))
    for key, t in full.items():
        assert half[key].dtype == dtype
        assert torch.equal(half[key], t.to(dtype))


def test_blobs_are_contiguous_and_aligned(tmp_path):
    path, _ = tiny_deepseek_v2(tmp_path, moe_intermediate_size=33, q_lora_rank=23)
    store = load(path, torch.bfloat16)
    assert store.experts[0] is None
    for key, t in all_views(store).items():
        assert t.data_ptr() % 64 == 0 and t.is_contiguous(), key
    experts = store.experts[1]
    assert experts.shape == (8, store.expert_layouts[1].nbytes) and experts.dtype == torch.uint8
    # Equal layers share a layout, so a GPU slot can be viewed by any of them.
    assert store.dense_layouts[1] is store.dense_layouts[3]
    assert store.dense_layouts[0] is not store.dense_layouts[1]
    slot = store.dense[2].clone()
    for name, t in store.dense_layouts[1].view(slot).items():
        assert torch.equal(t, store.dense_views(2)[name])
    with pytest.raises(InvalidInput, match="no routed experts"):
        store.expert_views(0, 0)


def test_layout_packs_in_order():
    shapes = {"a": (3, 5), "b": (1,), "c": (64,)}
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    layout = Layout.of(shapes, dtypes.__getitem__)
    assert [(n, e.offset, e.nbytes) for n, e in layout.entries.items()] == [
        ("a", 0, 30),
        ("b", 64, 4),
        ("c", 128, 128),
    ]
    assert layout.nbytes == 256
    views = layout.view(torch.zeros(300, dtype=torch.uint8))
    assert {n: (tuple(t.shape), t.dtype) for n, t in views.items()} == {
        n: (shapes[n], dtypes[n]) for n in shapes
    }


def test_dense_blob_is_what_the_ledger_counts():
    # At real widths the alignment costs nothing.
    for name in ("mixtral-8x7b", "deepseek-v2"):
        spec = ModelSpec.from_pretrained(name)
        family = family_for(spec)
        for i, layer in enumerate(spec.layers):
            experts = Layout.of(family.expert_layout(i), family.dtype_of).nbytes
            assert experts == layer.expert_bytes
            dense = Layout.of(family.dense_layout(i), family.dtype_of).nbytes
            # The float32 router of deepseek_v2 takes twice what the ledger counts for it.
            router = 2 * layer.n_experts * spec.hidden if name == "deepseek-v2" else 0
            assert dense == layer.dense_bytes + router
        head = Layout.of(family.head_layout(), family.dtype_of).nbytes
        assert head == spec.head_bytes


def test_progress_ends_at_the_total(tmp_path):
    path, _ = tiny_mixtral(tmp_path, sharded=True)
    seen = []
    store = load(path, progress=lambda done, total: seen.append((done, total)))
    total = sum(t.nbytes for t in all_views(store).values())
    assert {t for _, t in seen} == {total} and seen[-1][0] == total
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert len(seen) == len(tensors_of(path))


def test_tensors_that_are_not_used_are_noted(tmp_path):
    path, _ = tiny_mixtral(tmp_path)
    rewrite(path, tensors_of(path) | {"model.extra.weight": torch.zeros(2)})
    (note,) = load(path).notes
    assert "1 tensor(s)" in note and "model.extra.weight" in note


def test_an_output_matrix_that_is_tied_and_differs_is_noted(tmp_path):
    path, _ = tiny_mixtral(tmp_path)
    edit_config(path, tie_word_embeddings=True)
    (note,) = load(path).notes
    assert "lm_head.weight that differs from the embedding" in note and "tie_word" in note
    tensors = tensors_of(path)
    same = tensors["model.embed_tokens.weight"].clone()
    rewrite(path, tensors | {"lm_head.weight": same})
    assert load(path).notes == []
    rewrite(path, tensors | {"lm_head.weight": same[:-1].clone()})
    assert "differs" in load(path).notes[0]


def test_files_beside_the_index_are_not_read(tmp_path):
    path, _ = tiny_mixtral(tmp_path, sharded=True)
    (path / "consolidated.safetensors").write_bytes(b"not a checkpoint")
    assert load(path).notes == []


def broken_shard(path, keep):
    shard = sorted(path.glob("model-*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:keep])


def no_folder(path):
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()


def without_tensor(path):
    tensors = tensors_of(path)
    del tensors["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    rewrite(path, tensors)


def other_shape(path):
    tensors = tensors_of(path)
    key = "model.layers.1.self_attn.k_proj.weight"
    rewrite(path, tensors | {key: tensors[key].T.contiguous()})


def other_expert_count(path):
    edit_config(path, num_local_experts=7)


def quantised(path):
    tensors = tensors_of(path)
    key = "model.layers.1.self_attn.k_proj.weight"
    rewrite(path, tensors | {key: tensors[key].to(torch.int8)})


def index_lies(path):
    index = path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    files = data["weight_map"]
    files["model.norm.weight"] = next(f for f in files.values() if f != files["model.norm.weight"])
    index.write_text(json.dumps(data))


def bin_only(path):
    no_folder(path)
    (path / "pytorch_model.bin").write_bytes(b"")


def gguf_only(path):
    no_folder(path)
    (path / "model.gguf").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_folder, r"holds no \*\.safetensors$"),
        (bin_only, "save it again with safetensors"),
        (gguf_only, "GGUF"),
        (lambda p: broken_shard(p, -10), r"model-00004-of-.*\.safetensors cannot be read .* bytes"),
        (lambda p: broken_shard(p, 0), r"model-00004-of-.* cut short"),
        (
            lambda p: sorted(p.glob("model-*"))[2].unlink(),
            "index.json names 1 file.*model-00003-of-",
        ),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "no index of shards"),
        (index_lies, "has no tensor model.norm.weight, though the index"),
        (without_tensor, r"no tensor model.layers.1.*experts.5.w3.weight.*shape \[96, 64\]"),
        (other_shape, r"self_attn.k_proj.weight has shape \[64, 32\], wanted \[32, 64\]"),
        (other_expert_count, r"gate.weight has shape \[8, 64\], wanted \[7, 64\]"),
        (quantised, r"k_proj.weight has dtype I8"),
    ],
)
def test_broken_checkpoints_say_what_is_wrong(damage, says, tmp_path):
    path, _ = tiny_mixtral(tmp_path, sharded=True)
    damage(path)
    with pytest.raises(InvalidInput, match=says):
        load(path)


def test_a_missing_folder_is_named(tmp_path):
    spec = ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=1)
    with pytest.raises(InvalidInput, match="nowhere is no folder"):
        HostWeights.load(tmp_path / "nowhere", spec, family_for(spec))


def test_fused_tensor_of_another_shape_is_named(tmp_path):
    path, _ = tiny_mixtral(tmp_path, layout="fused")
    edit_config(path, intermediate_size=48)
    with pytest.raises(InvalidInput, match=r"gate_up_proj has shape \[8, 192, 64\], wanted"):
        load(path)


@pytest.mark.parametrize("make", MAKERS)
def test_random_weights_keep_activations_sane(make, tmp_path):
    path, _ = make(tmp_path, attention_bias=True)
    spec = ModelSpec.from_pretrained(path)
    family = family_for(spec)
    store, again = (HostWeights.random(spec, family, seed=1) for _ in range(2))
    assert_same(store, again)
    other = HostWeights.random(spec, family, seed=2)
    blobs = []
    for key, t in all_views(store).items():
        if t.dim() == 1:
            assert t.unique().tolist() == [0.0 if key[-1].endswith("bias") else 1.0]
            continue
        assert not torch.equal(t, all_views(other)[key])
        assert 0.8 < t.std().item() * t.shape[-1] ** 0.5 < 1.2, key
        assert len(t.unique(dim=0)) == len(t)
        blobs.append(t.flatten()[:64])
    assert len(torch.stack(blobs).unique(dim=0)) == len(blobs)
    for i, layer in enumerate(spec.layers):
        x, h, y = torch.randn(3, 9, spec.hidden)
        w, a, arena = store.dense_views(i), layer.attention, Arena(1 << 20, x.device)
        q, kv, o = (
            torch.empty(9, n) for n in (a.q_width("prefill"), a.kv_width, a.out_width("prefill"))
        )
        cos, sin = torch.empty(2, 9, len(family.rope.inv_freq))
        family.angles(torch.arange(9), cos, sin)
        family.pre_attn(w, x, cos, sin, "prefill", q, kv, arena)
        family.attn_prefill(w, q, kv, [9], torch.tensor([0, 9]).int(), o, arena)
        family.post_attn(w, o, x, h, "prefill", arena)
        for e in range(layer.n_experts):
            with arena.frame():
                family.expert(store.expert_views(i, e), h, y, arena)
            assert 0.01 < y.std() < 10
        assert 0.5 < x.std() < 5


def test_random_fills_what_is_larger_than_its_block(monkeypatch):
    monkeypatch.setattr("moegen.exec.weights._BLOCK", 997)
    spec = ModelSpec.from_pretrained("mixtral-8x7b")
    hf = spec.hf | {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 100}
    hf |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    spec = ModelSpec.from_config(hf, name="small")
    store = HostWeights.random(spec, family_for(spec, torch.float32))
    for key, t in all_views(store).items():
        assert t.dim() == 1 or len(t.unique(dim=0)) == len(t), key


def test_loading_takes_little_memory_beside_the_weights(tmp_path):
    """A file of 100 MB, read with conversion, in a process of its own."""
    path, _ = tiny_mixtral(tmp_path, intermediate_size=8192, num_hidden_layers=8)
    code = f"""
import torch
from moegen.exec.families import family_for
from moegen.exec.weights import HostWeights
from moegen.graph.host_memory import held_bytes, peak_bytes
from moegen.graph.model import ModelSpec

spec = ModelSpec.from_pretrained({str(path)!r}).with_(dtype="bfloat16")
family = family_for(spec, torch.bfloat16)
before = held_bytes()
weights = HostWeights.load({str(path)!r}, spec, family)
print(weights.nbytes, peak_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    weights, grown = map(int, done.stdout.split())
    assert weights > 180e6
    assert weights <= grown < weights + 60e6


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path):
    path, _ = tiny_mixtral(tmp_path)
    checkpoint = Checkpoint(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    key = max(checkpoint.tensors, key=lambda k: checkpoint.tensors[k].offset)
    with pytest.raises(InvalidInput, match=f"model.safetensors ends within tensor {key}"):
        checkpoint.read(key, torch.empty(checkpoint.tensors[key].shape))


@pytest.mark.parametrize("huge", [False, True])
def test_host_buffers_own_whole_pages(huge):
    for nbytes in (0, 1, 4096, 4097, 20 << 20):
        t = host_buffer(nbytes, huge=huge)
        assert t.shape == (nbytes,) and t.dtype == torch.uint8
        assert t.data_ptr() % (2 << 20 if huge and nbytes >= (8 << 20) else 4096) == 0
        storage = t.untyped_storage()
        end = storage.data_ptr() + storage.nbytes()
        assert t.data_ptr() + -(-nbytes // 4096) * 4096 <= end


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_failing_to_pin_is_a_note(tmp_path):
    path, _ = tiny_mixtral(tmp_path)
    with load(path, pin=True) as store:
        assert not store.pinned and "pageable" in repr(store)
        assert any("not pinned" in note and "no CUDA device" in note for note in store.notes)


@pytest.mark.gpu
def test_pinned_weights_reach_the_gpu_and_are_given_back(tmp_path):
    from moegen.exec.kernels import zero_copy  # Triton comes with CUDA builds of torch alone

    path, _ = tiny_deepseek_v2(tmp_path)
    spec = ModelSpec.from_pretrained(path)
    for _ in range(2):
        with HostWeights.load(path, spec, family_for(spec), pin=True) as store:
            assert store.pinned and store.notes == []
            # torch's is_pinned() knows memory of its own allocator alone; a kernel that reads
            # it in place knows better.
            for blob in (store.head, *store.dense, store.experts[1]):
                on_gpu = torch.empty_like(blob, device="cuda")
                zero_copy.copy_up(on_gpu, blob)
                assert torch.equal(on_gpu.cpu(), blob)
        assert not store.pinned
        again = Pins()  # would fail on memory that is still registered
        assert again.register([store.head, *store.dense]) is None
        again.unregister()


@pytest.mark.gpu
def test_a_failed_registration_leaves_cuda_usable(tmp_path):
    path, _ = tiny_mixtral(tmp_path)
    with load(path, pin=True) as store:
        store._pins.complete = False  # a second registration of the same memory must fail
        reason = store._pins.register([store.head])
        assert "CUDA error" in reason
        assert torch.ones(3, device="cuda").sum().item() == 3
        again = Pins()  # all are given back, none is half pinned
        assert again.register([store.head, *store.dense]) is None
        again.unregister()
