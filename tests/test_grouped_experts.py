"""Experts with few tokens each, computed several at once: the same answers as one by one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import tiny_deepseek_v2, tiny_mixtral  # noqa: E402

from moegen.exec import program  # noqa: E402
from moegen.exec.arena import Arena  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.layout import Layout  # noqa: E402
from moegen.graph.strategy import Plan, Strategy  # noqa: E402

PROMPTS = [[5, 9, 70, 3, 8], [11], [100, 42, 17], [60, 9, 4, 1, 77, 31]]


@pytest.fixture(scope="module", params=[tiny_mixtral, tiny_deepseek_v2])
def engine(request, tmp_path_factory):
    path, _ = request.param(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    with Engine.from_pretrained(path, device="cpu", dtype="float32") as e:
        yield e


def answers(engine, s):
    """Logits of a run by a plan, and how many experts each product took."""
    e = Engine(
        engine.prepared.with_plan(Plan(prefill=s.with_(omega=0.0), decode=s)), engine.weights
    )
    sizes = []
    family, several, one = e.machinery.family, e.machinery.family.experts, e.machinery.family.expert

    def counted(w, h, *args):
        sizes.append((len(w["gate_up"]), len(h)))
        several(w, h, *args)

    def single(w, h, *args):
        sizes.append((1, len(h)))
        one(w, h, *args)

    family.experts, family.expert = counted, single
    try:
        done = e.generate(PROMPTS, 6, ignore_eos=True, return_logits=True)
    finally:
        e.machinery.decode.close()
        del family.experts, family.expert
    return [x.logits for x in done], sizes


@pytest.mark.parametrize("resident", [0.0, 0.45, 1.0])
@pytest.mark.parametrize(("group", "b_e"), [(3, 64), (8, 64), (8, 7), (5, 1)])
def test_answers_are_the_same(engine, resident, group, b_e, monkeypatch):
    spec = engine.model
    s = Strategy(B=4, b_a=2, b_e=b_e, omega=0.5, expert_group=group)
    s = s.with_(
        s_expert=2 * group * spec.expert_bytes,
        s_params=int(resident * (spec.weight_bytes - spec.head_bytes)),
    )
    alone, sizes = answers(engine, s)
    assert {n for n, _ in sizes} == {1}
    monkeypatch.setitem(program.GROUPED_BELOW_TOKENS, "cpu", 10**6)
    monkeypatch.setattr(Arena, "poison", True)
    together, sizes = answers(engine, s)
    assert max(n for n, _ in sizes) > 1 or b_e == 1
    assert all(n <= group and tokens <= b_e for n, tokens in sizes)
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_many_tokens_and_routed_experts_stay_alone(engine, monkeypatch):
    s = Strategy(B=4, b_a=2, b_e=64, expert_group=4)
    # Of 15 prompt tokens no choice of experts leaves each with one.
    monkeypatch.setitem(program.GROUPED_BELOW_TOKENS, "cpu", 1)
    assert {n for n, _ in answers(engine, s)[1]} == {1}
    monkeypatch.setitem(program.GROUPED_BELOW_TOKENS, "cpu", 10**6)
    assert {n for n, _ in answers(engine, s.with_(fetch="routed"))[1]} == {1}


def test_stacks_are_views():
    layout = Layout.of({"a": (3, 5), "b": (7,)}, lambda _: torch.float32)
    flat = torch.arange(4 * layout.nbytes, dtype=torch.uint8)
    stacks = layout.stacked(flat)
    assert stacks["a"].shape == (4, 3, 5) and stacks["b"].shape == (4, 7)
    for i, one in enumerate(flat.split(layout.nbytes)):
        for name, t in layout.view(one).items():
            assert stacks[name][i].data_ptr() == t.data_ptr()
            assert stacks[name][i].stride() == t.stride()
