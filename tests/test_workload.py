"""Workload: histograms of lengths, presets, files of requests."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moegen.errors import InvalidInput
from moegen.graph.bisect import greatest
from moegen.graph.checks import MOST
from moegen.graph.quantiles import mixed
from moegen.graph.sizes import most_rows
from moegen.graph.workload import PRESETS, Workload


def test_uniform():
    w = Workload.uniform(n=10, prompt_len=5, gen_len=3)
    assert (w.n, w.prompt_tokens, w.gen_tokens, w.max_len, w.mean_len) == (10, 50, 30, 8, 8.0)
    prompts, gens = w.lengths
    assert prompts.tolist() == [5] * 10 and gens.tolist() == [3] * 10


def test_equal_lengths_share_a_group():
    w = Workload.from_lengths([5, 2, 5, 2], [1, 1, 1, 7])
    assert w.groups == ((2, 1, 1), (2, 7, 1), (5, 1, 2))
    assert (w.max_len, w.max_prompt_len, w.mean_len) == (9, 5, 24 / 4)
    assert [x.tolist() for x in w.lengths] == [[2, 2, 5, 5], [1, 7, 1, 1]]


def test_longest_rows():
    w = Workload.from_lengths([5, 2, 5, 2], [1, 1, 1, 7])
    assert [w.longest(k) for k in range(5)] == [0, 9, 15, 21, 24]
    assert w.longest(3, prompt_only=True) == 12
    assert w.longest(6) == 24 + 12  # two more rows of the mean length, 6


def group_by_group(rows: int, groups: list[tuple[int, int]], total: float) -> tuple[int, float]:
    """Rows that are missing in groups of (length, rows), and tokens of those that are not."""
    for length, n in groups:
        take = min(rows, n)
        total += take * length
        rows -= take
    return rows, total


small, any_size = st.integers(1, 30), st.integers(1, MOST)
some_groups = st.one_of(
    st.lists(st.tuples(small, small, small), min_size=1, max_size=20),
    st.lists(st.tuples(any_size, any_size, any_size), min_size=1, max_size=6),
)


@given(some_groups, st.integers(0, 700) | st.integers(0, 8 * MOST), st.booleans())
def test_longest_rows_are_those_of_a_walk_through_all_groups(groups, rows, prompt_only):
    w = Workload(tuple(groups))
    sizes = sorted(((p + (0 if prompt_only else g), n) for p, g, n in groups), reverse=True)
    left, tokens = group_by_group(rows, sizes, 0)
    total = sum(size * n for size, n in sizes)
    rows_of_all = sum(n for _, n in sizes)
    assert w.longest(rows, prompt_only=prompt_only) == tokens + -(-left * total // rows_of_all)
    assert (w.n, w.max_len) == (rows_of_all, max(p + g for p, g, _ in groups))


@given(some_groups, st.integers(1, 700) | st.integers(1, 8 * MOST), st.floats(0, 1))
def test_most_rows_of_a_side_are_those_of_a_walk_through_all_groups(groups, B, share):
    w = Workload(tuple(groups))
    shortest = sorted((p + 1, n) for p, _, n in w.groups)
    mean = sum(length * n for length, n in shortest) / w.n

    def tokens(rows: int, groups: list[tuple[int, int]]) -> float:
        left, total = group_by_group(rows, groups, 0.0)
        return total + left * mean

    def can_be(k: int) -> bool:
        others, rest = tokens(k - 1, shortest), tokens(B - k, shortest[::-1])
        last = shortest[-1][0] if share > 0.5 else tokens(k, shortest) - others
        slack = 1e-9 * (others + last + rest)
        return (1 - share) * others + (0.5 - share) * last <= share * rest + slack

    for rows in {0, 1, B // 2, B}:
        for sums, in_order in zip(w.first_step, (shortest, shortest[::-1]), strict=True):
            assert sums.first(rows) == group_by_group(rows, in_order, 0.0)[1]  # to the bit
    assert most_rows(w, B, share) == greatest(0, B, can_be)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"gen_len": -1}, "gen_len"),
        ({"gen_len": True}, "gen_len"),
    ],
)
def test_uniform_refuses(changes, name):
    with pytest.raises(InvalidInput, match=f"{name} must be a whole number of at least 1"):
        Workload.uniform(**{"n": 1, "prompt_len": 1, "gen_len": 1} | changes)


def test_no_rows():
    with pytest.raises(InvalidInput, match="has no rows"):
        Workload(())
    with pytest.raises(InvalidInput, match="equally long"):
        Workload.from_lengths([1, 2], [1])


@pytest.mark.parametrize("name", ["mmlu", "gsm8k", "chatbot-arena"])
def test_presets_are_those_of_the_paper(name):
    w = Workload.preset(name)
    with open(PRESETS.parent / "paper_results.csv", encoding="utf-8") as f:
        row = next(r for r in csv.DictReader(f) if f"workload {name}" in r["note"])
    ((prompt, gen, n),) = w.groups
    assert (str(prompt), str(gen)) == (row["prompt_len"], row["gen_len"])
    assert f"{n} sequences" in row["note"]


def test_unknown_preset():
    with pytest.raises(InvalidInput, match="presets are chatbot-arena, gsm8k, mmlu"):
        Workload.preset("hellaswag")


def count(content) -> int:
    text = content if isinstance(content, str) else " ".join(m["content"] for m in content)
    return len(text.split())


def test_jsonl(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [
        {"id": 1, "prompt": "a b c"},
        {"id": 2, "messages": [{"role": "user", "content": "a b"}], "max_tokens": 9},
        {"id": 3, "prompt": "x y z"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    w = Workload.from_jsonl(path, count_tokens=count, gen_len=4)
    assert w.groups == ((2, 9, 1), (3, 4, 2)) and w.name == "in.jsonl"


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", ":2: not JSON"),
        ('{"prompt": "a"}', ':2: the key "id" is missing'),
        ('{"id": 1, "prompt": "a"}', ":2: id 1 was used on line 1"),
        ('{"id": 2, "messages": ["a"]}', ":2: message 0 must be"),
        ('{"id": 2, "prompt": "a", "max_tokens": 0}', ":2: .max_tokens. must be"),
        ('{"id": 2, "prompt": ""}', ", id 2: the number of prompt tokens must be"),
    ],
)
def test_jsonl_is_read_by_the_rules_of_a_job(tmp_path, line, match):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "prompt": "fine", "max_tokens": null}\n' + line + "\n")
    with pytest.raises(InvalidInput, match=rf"in\.jsonl{match}"):
        Workload.from_jsonl(path, count_tokens=count)


def test_jsonl_that_is_empty_or_missing(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidInput, match=r"empty\.jsonl holds no request"):
        Workload.from_jsonl(tmp_path / "empty.jsonl", count_tokens=count)
    with pytest.raises(InvalidInput, match=r"cannot read .*none\.jsonl"):
        Workload.from_jsonl(tmp_path / "none.jsonl", count_tokens=count)


def test_dict_round_trip():
    w = Workload.from_lengths([5, 2, 5, 2], [1, 1, 1, 7], name="four")
    assert Workload.from_dict(json.loads(json.dumps(w.to_dict()))) == w


# Lengths that vary.


@pytest.mark.parametrize("name", ["mmlu", "gsm8k", "chatbot-arena"])
def test_a_spread_preset_has_the_rows_and_tokens_of_the_plain_one(name):
    plain, spread = Workload.preset(name), Workload.preset(name, spread=True)
    assert len(plain.groups) == 1 < len(spread.groups)
    for attribute in ("n", "prompt_tokens", "gen_tokens"):
        assert getattr(spread, attribute) == getattr(plain, attribute)
    assert spread == Workload.preset(name, spread=True)
    of_file = yaml.safe_load(PRESETS.read_text(encoding="utf-8"))[name]
    for lengths, key in zip(spread.lengths, ("prompt_sigma", "gen_sigma"), strict=True):
        assert np.log(lengths).std() == pytest.approx(of_file[key]["value"], abs=0.02)
        assert lengths.max() <= 8 * lengths.mean()
    assert of_file["prompt_sigma"]["source"].startswith("assumed")


@given(
    n=st.integers(1, 300),
    means=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    sigma=st.floats(0, 1.5),
)
def test_lognormal_lengths_have_just_their_mean(n, means, sigma):
    w = Workload.lognormal(n, *means, prompt_sigma=sigma, gen_sigma=sigma)
    assert (w.n, w.prompt_tokens, w.gen_tokens) == (n, n * means[0], n * means[1])


def test_lognormal_lengths_are_the_quantiles_of_the_distribution():
    prompts, gens = Workload.lognormal(9999, 1000, 300, prompt_sigma=0.5, gen_sigma=0.3).lengths
    median = 1000 / np.exp(0.5**2 / 2)  # of an unclipped distribution of this mean
    assert np.median(prompts) == pytest.approx(median, rel=0.03)
    for share, z in ((0.1587, -1), (0.8413, 1), (0.9772, 2)):
        assert np.quantile(prompts, share) == pytest.approx(median * np.exp(0.5 * z), rel=0.05)
    # Long prompts have no longer answers than short ones.
    assert abs(np.corrcoef(prompts, gens)[0, 1]) < 0.02


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 10**8},
        {"prompt_mean": 0},
        {"prompt_sigma": -0.1},
        {"gen_sigma": float("nan")},
        {"gen_sigma": 2.0},
    ],
)
def test_lognormal_refuses_what_is_no_distribution(wrong):
    fine = {"n": 10, "prompt_mean": 5, "gen_mean": 5, "prompt_sigma": 0.1, "gen_sigma": 0.1}
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Workload.lognormal(**(fine | wrong))


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000])
def test_every_run_of_mixed_values_is_like_the_whole(n):
    order = mixed(np.arange(n))
    assert sorted(order.tolist()) == list(range(n))
    for size in (n // 4, n // 2):
        for start in range(0, n - size + 1, max(1, size // 3)):
            if size >= 16:
                run = order[start : start + size] / n
                assert run.mean() == pytest.approx(0.5, abs=2 / size)
                assert np.median(run) == pytest.approx(0.5, abs=3 / size)
