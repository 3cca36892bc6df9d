"""``moegen run``: files of requests in and out, refusals and exit codes, on a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import moegen as mg
from moegen import jobs
from moegen.cli import main
from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import read_requests

CONTEXT, VOCAB = 1000, 10**6


class FakeTokenizer:
    """A character is a token; 1 begins a text."""

    chat_template = "yes"

    def __call__(self, text):
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        from jinja2.exceptions import TemplateError

        assert add_generation_prompt and not return_dict
        if messages[0]["role"] == "robot":
            raise TemplateError("no robots")
        return [1, *map(ord, "".join(m["role"] + m["content"] for m in messages))]


class FakeEngine:
    """Answers with the prompt upside down; the last row ends first."""

    calls: list[dict] = []
    tokenizer: FakeTokenizer | None = FakeTokenizer()
    model = SimpleNamespace(max_context=CONTEXT, vocab=VOCAB, dtype="bfloat16")
    device = SimpleNamespace(type="cpu")
    hardware = SimpleNamespace(gpu_name="none")
    ledger: mg.Ledger | None = None
    refuses: mg.Infeasible | None = None
    weights = SimpleNamespace(pinned=True, notes=[])
    fail: BaseException | None = None
    after_rows = 0

    @classmethod
    def from_pretrained(cls, path, **kwargs):
        cls.calls.append({"path": path, **kwargs})
        kwargs["progress"](512, 1024)
        kwargs["progress"](1024, 1024)
        return cls()

    def resolve(self, work):
        self.calls.append({"work": work})
        if self.refuses is not None:
            raise self.refuses
        s = mg.Strategy(B=work.n, b_a=2, b_e=64, s_expert=2**30)
        model, hw = mg.ModelSpec.from_pretrained("mixtral-8x7b"), mg.HardwareSpec.from_name("c2")
        self.ledger = mg.memory(model, hw, s, work)
        return mg.Plan(prefill=s.with_(b_a=1), decode=s)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.calls.append({"closed": True})

    timelines: list = []

    def generate(self, prompts, max_new_tokens, on_finish, on_step):
        self.calls.append({"prompts": prompts, "max_new_tokens": max_new_tokens})
        for i in reversed(range(len(prompts))):
            if self.fail is not None and len(prompts) - 1 - i == self.after_rows:
                raise self.fail
            text = "".join(chr(t) for t in reversed(prompts[i]))[: max_new_tokens[i]]
            on_finish(
                i,
                SimpleNamespace(
                    text=text,
                    prompt_tokens=len(prompts[i]),
                    completion_tokens=len(text),
                    finish_reason="length",
                ),
            )
            on_step(SimpleNamespace(phase="decode", rows=i + 1, tokens_done=1, elapsed_s=1.0))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setitem(mg.__dict__, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "calls", [])
    return FakeEngine


@pytest.fixture
def job(tmp_path, engine, capsys):
    """Runs ``moegen run`` on the given lines; gives the exit code and what it said."""
    (tmp_path / "model").mkdir()

    def run(lines, *flags, output="out.jsonl"):
        source = tmp_path / "in.jsonl"
        if isinstance(lines, bytes):
            source.write_bytes(lines)
        else:
            source.write_text("".join(f"{x}\n" for x in lines))
        argv = ["run", "--model", str(tmp_path / "model"), "--input", str(source)]
        with pytest.raises(SystemExit) as exit_:
            main([*argv, "--output", str(tmp_path / output), *flags])
        said = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code, out=said.out, err=said.err)

    run.output = tmp_path / "out.jsonl"
    run.partial = tmp_path / "out.jsonl.partial"
    return run


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _line(id, prompt="abc", **more):
    return json.dumps({"id": id, "prompt": prompt, **more})


def test_rows_come_out_in_the_order_of_the_input(job, engine):
    done = job([_line("a"), "", _line(7, "xyz", max_tokens=2, note="ignored"), _line("ü", "né")])
    assert done.code == 0, done.err
    assert _rows(job.output) == [
        {
            "id": "a",
            "text": "cba",
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "finish_reason": "length",
        },
        {
            "id": 7,
            "text": "zy",
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "finish_reason": "length",
        },
        {
            "id": "ü",
            "text": "én",
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "finish_reason": "length",
        },
    ]
    assert done.out == "" and "3 of 3 rows answered" in done.err
    assert sorted(p.name for p in job.output.parent.iterdir()) == ["in.jsonl", "model", "out.jsonl"]
    assert engine.calls[-1] == {"closed": True}


def test_json_summary_goes_to_stdout(job):
    done = job([_line(1), _line(2, "")], "--json", "--max-tokens", "2")
    summary = json.loads(done.out)
    assert {k: summary[k] for k in ("rows", "served", "errors")} == {
        "rows": 2,
        "served": 1,
        "errors": 1,
    }
    assert (summary["prompt_tokens"], summary["completion_tokens"]) == (3, 2)
    assert summary["tokens_per_s"] == pytest.approx(2 / summary["time_s"])
    assert summary["output"] == str(job.output)
    assert (summary["device"], summary["dtype"]) == ("cpu", "bfloat16")
    assert mg.Strategy(**summary["plan"]["decode"]) == mg.Strategy(1, 2, 64, s_expert=2**30)
    assert summary["plan"]["prefill"]["b_a"] == 1
    gpu = summary["memory"]["gpu"]
    assert gpu["capacity_bytes"] == 24 * 10**9 > gpu["planned_bytes"] > 2**28


def test_the_plan_is_told_before_anything_runs(job, engine, monkeypatch):
    lines = job([_line(1), _line(2)]).err.splitlines()
    told = [next(i for i, x in enumerate(lines) if x.startswith(s)) for s in ("Device", "Decode")]
    assert lines[told[0]] == "Device cpu, bfloat16"
    assert lines[told[1]].startswith("Decode:  B=2, b_a=2, b_e=64, s_expert=1.00 GiB, s_params=0 B")
    assert lines[told[1] - 1].startswith("Prefill: B=2, b_a=1,")
    done = next(i for i, x in enumerate(lines) if "rows answered" in x)
    memory = next(i for i, x in enumerate(lines) if x.startswith("Memory planned for decoding: "))
    assert told[1] < done < memory and " of 476.84 GiB, in the GPU's stead " in lines[memory]

    job.output.unlink()
    monkeypatch.setattr(engine, "fail", MachineError("fell off"))
    monkeypatch.setattr(engine, "device", SimpleNamespace(type="cuda"))
    said = job([_line(1), _line(2)]).err
    assert "Decode:  B=2" in said and "Device cuda (none), bfloat16" in said


def test_loading_shows_how_much_and_how_fast(job):
    said = job([_line(1)]).err
    loading = next(line for line in said.splitlines() if line.startswith("loading"))
    assert "1.0/1.0 kB" in loading


def test_messages_go_through_the_chat_template_and_get_one_bos(job, engine):
    messages = [{"role": "user", "content": "hi"}]
    assert job([json.dumps({"id": 1, "messages": messages})]).code == 0
    assert engine.calls[2]["prompts"] == [[1, *map(ord, "userhi")]]


def test_rows_that_cannot_be_served_become_errors_and_the_others_run(job, engine):
    lines = [
        _line("empty", ""),
        _line("long", "x" * CONTEXT, max_tokens=1),
        _line("fits", "x" * (CONTEXT - 1), max_tokens=1),
        _line("grows", "x" * 500, max_tokens=501),
        json.dumps({"id": "none", "messages": []}),
        json.dumps({"id": "robot", "messages": [{"role": "robot", "content": "beep"}]}),
    ]
    assert job(lines).code == 0
    rows = {row["id"]: row for row in _rows(job.output)}
    assert list(rows) == ["empty", "long", "fits", "grows", "none", "robot"]
    assert rows["fits"]["text"] == "x" and len(engine.calls[2]["prompts"]) == 1
    assert rows["empty"] == {"id": "empty", "error": "the prompt is empty"}
    assert "1 more than the model's context of 1000" in rows["long"]["error"]
    assert "1 more than the model's context of 1000" in rows["grows"]["error"]
    assert "no robots" in rows["robot"]["error"] and "empty" in rows["none"]["error"]


def test_a_file_without_one_servable_row_is_still_answered(job, engine):
    assert job([_line(1, "")]).code == 0
    assert _rows(job.output) == [{"id": 1, "error": "the prompt is empty"}]
    job.output.unlink()
    summary = json.loads(job([_line(1, "")], "--json").out)
    assert summary["plan"] is None and summary["memory"] is None


def test_messages_without_a_chat_template_are_an_error_of_the_row(job, monkeypatch):
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    job([json.dumps({"id": 1, "messages": [{"role": "user", "content": "hi"}]}), _line(2)])
    error, answer = _rows(job.output)
    assert "no chat template" in error["error"] and answer["text"] == "cba"


@pytest.mark.parametrize(
    ("lines", "line", "reason"),
    [
        ([_line(1), "{'id': 2}"], 2, "not JSON"),
        ([_line(1), "", _line(1)], 3, "id 1 was used on line 1 already"),
        ([_line("1"), _line(1)], 2, "used on line 1"),
        ([_line(1), '{"prompt": "x"}'], 2, '"id" is missing'),
        (['{"id": 1}'], 1, "both are missing"),
        (['{"id": 1, "prompt": "x", "messages": []}'], 1, "both are there"),
        (["[1]"], 1, "not a list"),
        ([_line(None)], 1, "not null"),
        ([_line(True)], 1, "not true or false"),
        ([_line(1.5)], 1, "not a number"),
        ([_line(1, 5)], 1, '"prompt" must be a string'),
        ([_line(1, max_tokens=0)], 1, "at least 1, got 0"),
        ([_line(1, max_tokens="9")], 1, '"max_tokens"'),
        ([_line(1, max_tokens=True)], 1, '"max_tokens"'),
        (['{"id": 1, "messages": "hi"}'], 1, "must be a list, not a string"),
        (['{"id": 1, "messages": ["hi"]}'], 1, "message 0 must be a JSON object"),
        (['{"id": 1, "messages": [{"role": "user"}]}'], 1, 'string "content"'),
        (['{"id": 1, "prompt": "\\ud800"}'], 1, "surrogate"),
        (b'{"id": 1, "prompt": "x"}\n{"id": 2, "prompt": "\xff"}\n', 2, "not UTF-8"),
    ],
)
def test_a_malformed_file_is_refused_whole_before_anything_loads(job, engine, lines, line, reason):
    done = job(lines)
    assert done.code == 2
    assert f"in.jsonl:{line}: " in done.err and reason in done.err
    assert "Traceback" not in done.err
    assert engine.calls == [] and not job.output.exists() and not job.partial.exists()


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_file_without_requests_is_refused(job, engine, lines):
    done = job(lines)
    assert done.code == 2 and "holds no request" in done.err and engine.calls == []


def test_an_input_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot read .*nothing.jsonl: No such file"):
        read_requests(tmp_path / "nothing.jsonl")


def test_existing_output_is_never_overwritten(job, engine):
    job.output.write_text("precious")
    done = job([_line(1)])
    assert done.code == 2 and "exists already" in done.err and engine.calls == []
    assert job.output.read_text() == "precious"


def test_output_needs_its_folder(job, engine):
    done = job([_line(1)], output="no/such/out.jsonl")
    assert done.code == 2 and "is no folder" in done.err and engine.calls == []


def test_ctrl_c_keeps_finished_rows_and_the_same_job_can_start_again(job, engine, monkeypatch):
    monkeypatch.setattr(engine, "fail", KeyboardInterrupt())
    monkeypatch.setattr(engine, "after_rows", 1)
    lines = [_line(1), _line(2, "two")]
    done = job(lines)
    assert done.code == 130 and "out.jsonl.partial" in done.err and "Traceback" not in done.err
    assert engine.calls[-1] == {"closed": True}
    assert not job.output.exists()
    header, row = _rows(job.partial)
    assert list(header) == ["job"] and row["id"] == 2 and row["text"] == "owt"

    monkeypatch.setattr(engine, "fail", None)
    other = job([_line(1), _line(2, "other")])
    assert other.code == 2 and "belongs to another job" in other.err
    assert job(lines, "--max-tokens", "3").code == 2
    assert _rows(job.partial) == [header, row]
    assert job(lines).code == 0
    assert [r["id"] for r in _rows(job.output)] == [1, 2] and not job.partial.exists()


def test_a_full_disk_is_a_fault_of_the_machine(job, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jobs.os, "fsync", full)
    done = job([_line(1)])
    assert done.code == 1 and "No space left on device" in done.err
    assert "out.jsonl.partial" in done.err and "Traceback" not in done.err
    assert not job.output.exists() and len(_rows(job.partial)) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(MachineError("the device fell off"), 1), (mg.Infeasible("4 GiB too much"), 3)],
)
def test_errors_of_moegen_are_one_message_and_an_exit_code(job, engine, monkeypatch, error, code):
    monkeypatch.setattr(engine, "fail", error)
    done = job([_line(1)])
    assert done.code == code
    assert done.err.splitlines()[-1] == f"moegen: {error}" and "Traceback" not in done.err


@pytest.mark.parametrize("how", ["refused", "failed", "stopped"])
def test_a_job_that_answered_nothing_leaves_nothing_in_the_way(job, engine, monkeypatch, how):
    if how == "refused":
        error = mg.Infeasible("does not fit gpu memory: too much. Try a smaller b_a or kv_slots")
        monkeypatch.setattr(engine, "refuses", error)
    else:
        fail = KeyboardInterrupt() if how == "stopped" else MachineError("fell off")
        monkeypatch.setattr(engine, "fail", fail)
    lines = [_line(1), _line(2, "")]  # an error line is no answer
    done = job(lines, "--max-tokens", "9")
    assert done.code == {"refused": 3, "failed": 1, "stopped": 130}[how]
    assert not job.partial.exists() and "partial" not in done.err
    if how == "refused":
        assert done.err.splitlines()[-1].endswith("Try a smaller --b-a or --kv-slots")
    monkeypatch.setattr(engine, "fail", None)
    monkeypatch.setattr(engine, "refuses", None)
    assert job(lines, "--max-tokens", "8").code == 0


def test_a_refused_plan_leaves_the_answers_of_a_job_cut_short(job, engine, monkeypatch):
    monkeypatch.setattr(engine, "fail", KeyboardInterrupt())
    monkeypatch.setattr(engine, "after_rows", 1)
    lines = [_line(1), _line(2)]
    assert job(lines).code == 130
    before = job.partial.read_text()
    monkeypatch.setattr(engine, "refuses", mg.Infeasible("too much"))
    assert job(lines).code == 3 and job.partial.read_text() == before


def test_a_second_try_that_answers_nothing_keeps_the_answers_of_the_first(job, engine, monkeypatch):
    monkeypatch.setattr(engine, "fail", KeyboardInterrupt())
    monkeypatch.setattr(engine, "after_rows", 1)
    lines = [_line(1), _line(2)]
    assert job(lines).code == 130
    before = job.partial.read_text()
    monkeypatch.setattr(engine, "after_rows", 0)
    assert job(lines).code == 130 and job.partial.read_text() == before
    monkeypatch.setattr(engine, "fail", None)
    assert job(lines).code == 0
    assert sorted(f.name for f in job.partial.parent.glob("out.jsonl*")) == ["out.jsonl"]


@pytest.mark.parametrize("said", ["", "Unable to allocate 9.00 TiB"])
def test_too_little_host_memory_is_a_fault_of_the_machine(job, engine, monkeypatch, said):
    monkeypatch.setattr(engine, "fail", MemoryError(said))
    monkeypatch.setattr(engine, "after_rows", 1)
    done = job([_line(1), _line(2)])
    assert done.code == 1 and "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert f"out of host memory ({said or 'an allocation failed'}), of which there are" in last
    assert "smaller --B" in last and "--host-memory" in last and "out.jsonl.partial" in last
    assert [row["id"] for row in _rows(job.partial)[1:]] == [2]


@pytest.mark.cpu
@pytest.mark.parametrize("loading", [False, True])
def test_too_little_gpu_memory_is_a_fault_of_the_machine(job, engine, monkeypatch, loading):
    torch = pytest.importorskip("torch")
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
        "of which 1.20 GiB is free. Including non-PyTorch memory, this process has 22.43 GiB"
    )

    def fail(*_, **__):
        raise error

    if loading:
        monkeypatch.setattr(engine, "from_pretrained", fail)
    else:
        monkeypatch.setattr(engine, "fail", error)
        monkeypatch.setattr(engine, "after_rows", 1)
    done = job([_line(1), _line(2)])
    assert done.code == 1 and "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert "Tried to allocate 20.00 GiB" in last and "1.20 GiB is free. End what" in last
    assert "--b-a" in last and "--gpu-memory" in last and "Including" not in last
    assert ("out.jsonl.partial" in last) is not loading


@pytest.mark.cpu
def test_other_errors_of_torch_keep_their_traceback(tmp_path, engine, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(engine, "fail", RuntimeError("CUDA error: an illegal memory access"))
    (tmp_path / "in.jsonl").write_text(_line(1))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    with pytest.raises(RuntimeError, match="illegal"):
        main(["run", "--model", str(tmp_path), *files])


def test_notes_of_the_weights_are_warnings_at_both_ends(job, engine, monkeypatch):
    notes = ["weights are not pinned: status 2", "3 tensor(s) are not used"]
    monkeypatch.setattr(engine, "weights", SimpleNamespace(pinned=False, notes=notes))
    done = job([_line(1)], "--json")
    assert done.code == 0 and json.loads(done.out)["notes"] == notes
    lines = done.err.splitlines()
    for note in notes:
        first, last = (i for i, x in enumerate(lines) if x == f"moegen: warning: {note}")
        assert first < next(i for i, x in enumerate(lines) if "rows answered" in x) < last


def test_a_saved_timeline_says_how_the_weights_lay(job, engine, monkeypatch, tmp_path):
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=1)
    graph = mg.build(model, mg.Strategy(B=2, b_a=1, b_e=4), kv_len=8)
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    monkeypatch.setattr(engine, "timelines", [mg.simulate(graph, cost)])
    monkeypatch.setattr(engine, "weights", SimpleNamespace(pinned=False, notes=["why"]))
    assert job([_line(1)], "--timeline", str(tmp_path / "t.json")).code == 0
    meta = mg.Timeline.load(tmp_path / "t.json").meta
    assert (meta["pinned"], meta["notes"]) == (False, ["why"])


def test_a_bug_keeps_its_traceback(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(engine, "fail", ZeroDivisionError("a bug"))
    (tmp_path / "in.jsonl").write_text(_line(1))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    with pytest.raises(ZeroDivisionError):
        main(["run", "--model", str(tmp_path), *files])


def test_a_checkpoint_without_tokenizer_is_refused(job, engine, monkeypatch):
    monkeypatch.setattr(engine, "tokenizer", None)
    done = job([_line(1)])
    assert done.code == 2 and "no tokenizer" in done.err and not job.partial.exists()


def test_flags_reach_the_engine(job, engine):
    flags = "--device cpu --dtype float32 --gpu-memory 2GiB --host-memory 1e9".split()
    assert job([_line(1)], *flags, "--schedule", "module").code == 0
    call = engine.calls[0]
    assert (call["plan"], call["device"], call["dtype"]) == ("auto", "cpu", "float32")
    assert (call["gpu_memory_bytes"], call["host_memory_bytes"]) == (2 * 2**30, 10**9)
    assert callable(call["progress"])


def test_strategy_flags_stay_as_given(job, engine):
    flags = (
        "--B 12 --b-a 3 --b-e 64 --s-expert 8MiB --s-params 1GB --omega 0.5 --kv-slots 3 "
        "--dense-slots 4 --expert-group 2 --fetch routed"
    )
    assert job([_line(i) for i in range(12)], *flags.split()).code == 0
    assert engine.calls[0]["plan"] == dict(
        B=12,
        b_a=3,
        b_e=64,
        s_expert=8 * 2**20,
        s_params=10**9,
        omega=0.5,
        kv_slots=3,
        dense_slots=4,
        expert_group=2,
        fetch="routed",
    )


def test_what_no_flag_says_is_left_to_the_engine(job, engine):
    assert job([_line(1), _line(2)], "--omega", "0").code == 0
    assert engine.calls[0]["plan"] == {"omega": 0.0}


def test_more_rows_in_flight_than_requests_are_taken_as_all(job, engine):
    done = job([_line(1), _line(2)], "--B", "100")
    assert done.code == 0 and engine.calls[0]["plan"] == {"B": 2}
    assert "--B 100 is more than there are rows: taken as 2" in done.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--s-expert 3furlongs", "--s-expert: '3furlongs' is not a size"),
        ("--gpu-memory -1", "--gpu-memory: '-1' is not a size"),
        ("--omega 1.5", "--omega"),
        ("--B 0", "--B"),
        ("--device tpu", "--device"),
        ("--schedule deepspeed", "--schedule: 'deepspeed' is not there yet; known: module"),
        ("--timeline /no/such/folder/t.json", "--timeline: /no/such/folder is no folder"),
        ("--timeline /", "--timeline: / is a folder"),
        ("--model /no/such/model", "no folder with a checkpoint"),
    ],
)
def test_wrong_flags_are_refused_before_anything_loads(job, engine, flags, reason):
    done = job([_line(1)], *flags.split())
    assert done.code == 2 and reason in done.err and engine.calls == []


def test_version(monkeypatch, capsys):
    monkeypatch.setitem(mg.__dict__, "__version__", "1.2.3")
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0 and capsys.readouterr().out == "moegen 1.2.3\n"


def _main(capsys, line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def test_inspect_memory_and_simulate_call_the_python_api(tmp_path, capsys):
    code, out, _ = _main(capsys, "inspect mixtral-8x7b --json")
    assert code == 0 and json.loads(out)["kv_bytes_per_token"] == 131072

    code, out, _ = _main(capsys, "memory mixtral-8x7b --hw c2 --B 3640 --b-a 64 --json")
    assert code == 0 and json.loads(out)["fits"]
    code, out, err = _main(capsys, "memory mixtral-8x7b --hw c2 --B 9000 --b-a 64 --json")
    assert code == 3 and not json.loads(out)["fits"] and "host memory" in err

    point = "mixtral-8x7b --hw c2 --B 512 --b-a 64 --omega 0.5"
    trace = tmp_path / "trace.json"
    code, out, _ = _main(capsys, f"simulate {point} --steps 2 --trace {trace} --json")
    result = json.loads(out)
    assert code == 0 and result["period_s"] >= result["bound_s"] > 0
    assert json.loads(trace.read_text())["traceEvents"]


POINT = "mixtral-8x7b --hw c2 --B 512 --b-a 64"


@pytest.mark.parametrize("command", ["memory", "simulate"])
def test_a_preset_is_the_workload_of_its_lengths(capsys, command):
    _, named, _ = _main(capsys, f"{command} {POINT} --workload mmlu --json")
    _, spelt, _ = _main(capsys, f"{command} {POINT} --n 116000 --prompt-len 512 --gen-len 1 --json")
    _, other, _ = _main(capsys, f"{command} {POINT} --json")
    assert json.loads(named) == json.loads(spelt) != json.loads(other)


@pytest.mark.parametrize("command", ["memory", "simulate"])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (f"{POINT} --workload mmlu --n 5", "mmlu says that already: drop --n"),
        (f"{POINT} --workload mmlu --gen-len 5", "mmlu says that already: drop --gen-len"),
        (f"{POINT} --workload mlu", "'mlu' is no file, and none of the presets chatbot-arena, "),
        (f"{POINT} --workload {__file__}", "mixtral-8x7b is no folder"),
        (f"{POINT} --schedule flexgen", "--schedule: 'flexgen' is not there yet; known: module"),
        ("mixtral-8x7b --hw c2 --omega 1", "--B is missing"),
    ],
)
def test_wrong_points_are_refused(capsys, command, flags, reason):
    code, out, err = _main(capsys, f"{command} {flags}")
    assert (code, out) == (2, "") and reason in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--trace nodir/t.json", "--trace: nodir is no folder: make it first"),
        ("--trace .", "--trace: . is a folder"),
        ("--hw c4", "'c4' is no file, and none of c1, c2, c3, h200"),
        ("--hw c4", "--hw FILE.yaml: a copy of "),
        ("--hw none.yaml", "none.yaml cannot be read: No such file or directory\n"),
    ],
)
def test_places_and_machines_are_checked_before_any_work(capsys, monkeypatch, flags, reason):
    def work(*_, **__):
        raise AssertionError("work was done")

    monkeypatch.setattr(mg, "simulate", work, raising=False)
    code, out, err = _main(capsys, f"simulate {POINT} {flags}")
    assert (code, out) == (2, "") and reason in err and "from_yaml" not in err
    assert "Errno" not in err


def test_a_timeline_never_lands_on_the_requests(job, tmp_path):
    for name in ("in.jsonl", "out.jsonl"):
        done = job([_line(1)], "--timeline", str(tmp_path / name))
        assert done.code == 2 and "file of requests or of answers" in done.err


@pytest.mark.parametrize("command", ["memory", "simulate"])
def test_more_rows_in_flight_than_the_workload_has_are_taken_as_all(capsys, command):
    point = f"{command} mixtral-8x7b --hw c2 --n 4 --json"
    code, many, err = _main(capsys, f"{point} --B 100")
    assert code == 0 and err == "moegen: --B 100 is more than there are rows: taken as 4\n"
    code, four, err = _main(capsys, f"{point} --B 4")
    assert code == 0 and err == "" and many == four


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("--B 9000", "Try a smaller --B"),
        ("--B 3640 --b-a 2048 --kv-slots 4", "Try a smaller --b-a or fewer --kv-slots"),
        ("--B 512 --s-params 30GB", "Try a smaller --s-params"),
        ("--B 512 --s-expert 30GB", "Try a smaller --s-expert or --expert-group"),
    ],
)
def test_advice_names_flags(capsys, flags, advice):
    code, _, err = _main(capsys, f"memory mixtral-8x7b --hw c2 {flags} --n 10000 --json")
    assert code == 3 and err.endswith(f"{advice}\n")


def test_fields_and_flags_are_the_same():
    from dataclasses import fields

    from moegen.cli.flags import _STRATEGY_FLAGS

    assert list(_STRATEGY_FLAGS) == [field.name for field in fields(mg.Strategy)]


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration alone."""
    (tmp_path / "config.json").write_text(
        json.dumps(mg.ModelSpec.from_pretrained("mixtral-8x7b").hf)
    )
    return tmp_path


@pytest.mark.cpu
def test_a_file_is_counted_with_the_models_tokenizer(folder, capsys, monkeypatch):
    pytest.importorskip("transformers")
    file = folder / "in.jsonl"
    lines = [_line(1, "x" * 100, max_tokens=7), _line(2, "x" * 300), _line(3, "x" * 500)]
    file.write_text("\n".join(lines))
    point = f"{folder} --hw c2 --B 3 --workload {file}"
    code, out, err = _main(capsys, f"memory {point}")
    assert (code, out) == (2, "") and f"tokenizer, and {folder} has none" in err

    monkeypatch.setattr("moegen.exec.loading.load_tokenizer", lambda _: FakeTokenizer())
    wanted = mg.Workload(((100, 7, 1), (300, 20, 1), (500, 20, 1)))
    model, hw = mg.ModelSpec.from_pretrained(folder), mg.HardwareSpec.from_name("c2")
    ledger = mg.memory(model, hw, mg.Strategy(B=3, b_a=3, b_e=8192), wanted)
    code, out, _ = _main(capsys, f"memory {point} --gen-len 20 --json")
    assert code == 0 and json.loads(out) == ledger.to_dict()

    # The mean row: 300 tokens and half of 47/3.
    code, out, _ = _main(capsys, f"simulate {point} --gen-len 20 --json")
    uniform = f"simulate {folder} --hw c2 --B 3 --n 3 --prompt-len 300 --gen-len 15 --json"
    assert code == 0 and json.loads(out) == json.loads(_main(capsys, uniform)[1])

    file.write_text(_line(1, ""))
    code, _, err = _main(capsys, f"memory {point}")
    assert code == 2 and "in.jsonl, id 1: the prompt is empty" in err


def test_a_demo_that_has_no_place_is_refused_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, out, err = _main(capsys, f"demo --folder {tmp_path / 'file' / 'a' / 'demo'}")
    assert (code, out) == (2, "") and f"{tmp_path / 'file'} is no folder" in err
