"""``moegen run``: files of requests in and out, refusals and exit codes, on a fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import CONTEXT, FakeEngine, FakeTokenizer

import moegen as mg
from moegen.cli import main
from moegen.errors import InvalidInput, MachineError
from moegen.graph import files
from moegen.graph.requests import read_requests
from moegen.jobs import Output, Report


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


def _call(engine, key):
    """The call to the engine that has this key."""
    (call,) = [call for call in engine.calls if key in call]
    return call


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


def test_json_holds_the_run_against_the_plan(job, engine):
    done = job([_line(1), _line(2)], "--json", "--max-tokens", "2")
    found = json.loads(done.out)
    assert found["load_bytes"] == 2 * 10**9
    assert found["load_bytes_per_s"] == pytest.approx(2e9 / found["load_s"])
    host, gpu = found["memory"]["host"], found["memory"]["gpu"]
    assert (host["peak_bytes"], gpu["peak_bytes"]) == (3 * 2**30, None)
    # On CPU lanes the GPU's buffers lie in host memory: that is what a peak compares with.
    both = host["planned_bytes"] + gpu["planned_bytes"]
    assert max(host["planned_bytes"], gpu["planned_bytes"]) < host["in_host_bytes"] <= both
    assert (found["prefill_s"], found["decode_s"]) == (1.0, 4.0)
    for name in ("expected", "predicted"):
        times = found[name]
        assert times["time_s"] == pytest.approx(times["prefill_s"] + times["decode_s"])
    assert found["predicted_error"] == pytest.approx(found["predicted"]["time_s"] / 5.0 - 1)
    link = found["machine"]["rates"]["h2d_bytes_per_s"]
    assert link["value"] == engine.hardware.h2d_bytes_per_s and "implied" in link["source"]


def test_predictions_are_for_the_limits_before_and_for_what_came_out_after(
    job, engine, monkeypatch
):
    seen = []

    def estimate(model, plan, work, cost):
        seen.append((model, *map(list, work)))
        return SimpleNamespace(time_s=3.0, prefill_s=1.0, decode_s=2.0, decode_steps=4)

    monkeypatch.setattr("moegen.sim.job.estimate_job", estimate)
    said = job([_line(1, "abc"), _line(2, "defgh"), _line(3, "")], "--max-tokens", "4").err
    assert seen == [(engine.model, [3, 5], [4, 4]), (engine.model, [3, 5], [3, 4])]
    assert "Time:    about 3.00 s expected" in said
    # Prefill 1 s and decode 4 s were measured.
    assert "  Time     5.00 s, predicted for these answers 3.00 s (-40%)\n" in said
    assert "           prefill 1.00 s, predicted 1.00 s (+0%)\n" in said
    assert "           decode 4.00 s, predicted 2.00 s (-50%)\n" in said


def test_the_plan_is_told_before_anything_runs(job, engine, monkeypatch):
    lines = job([_line(1), _line(2)]).err.splitlines()
    at = {name: _index(lines, name) for name in ("Device", "Prefill", "Decode", "Memory", "Rates")}
    assert lines[at["Device"]] == "Device cpu, bfloat16"
    assert lines[at["Decode"]].startswith(
        "Decode:  B=2, b_a=2, b_e=64, s_expert=1.00 GiB, s_params=0 B"
    )
    assert lines[at["Prefill"]].startswith("Prefill: B=2, b_a=1,")
    assert " of 476.84 GiB, CPU lanes (no GPU) " in lines[at["Memory"]]
    assert "link to the GPU" in lines[at["Rates"]]
    assert max(at.values()) < _index(lines, "loading") < _index(lines, "2 of 2 rows answered")
    assert any("both lie in host memory: " in x and "3.00 GiB at its peak" in x for x in lines)

    job.output.unlink()
    monkeypatch.setattr(engine, "device", SimpleNamespace(type="cuda"))
    lines = job([_line(1), _line(2)]).err.splitlines()
    assert lines[_index(lines, "Device")] == "Device cuda (RTX A5000), bfloat16"
    assert any("GPU " in x and "planned, 1.00 GiB at its peak" in x for x in lines)

    job.output.unlink()
    monkeypatch.setattr(engine, "fail", MachineError("fell off"))
    assert "Decode:  B=2" in job([_line(1), _line(2)]).err


def _index(lines, start):
    return next(i for i, x in enumerate(lines) if x.startswith(start))


def test_loading_shows_how_much_and_how_fast(job):
    lines = job([_line(1)]).err.splitlines()
    assert "2.00/2.00 GB, " in lines[_index(lines, "loading")]
    assert lines[_index(lines, "loading")].endswith(" GB/s")
    assert "2.00 GB in " in lines[_index(lines, "  Loading")]


def test_progress_goes_to_a_log_file_as_lines(job, monkeypatch):
    monkeypatch.setattr("moegen.cli.console.LINE_EVERY_S", 0.0)
    lines = job([_line(1), _line(2), _line(3)]).err.splitlines()
    decode = [x for x in lines if x.startswith("decode ")]
    assert len(decode) == 3
    # One of three rows is done, all its 3 tokens, and each step took 2 s.
    assert decode[0].startswith("decode  1/3 rows, 1/515 tokens, 1.5 tokens/s, ")
    assert decode[0].endswith(" left")


def test_a_plan_that_does_not_fit_is_refused_before_anything_loads(job, engine, monkeypatch):
    monkeypatch.setattr(engine, "refuses", mg.Infeasible("does not fit host memory: too much"))
    done = job([_line(1)])
    assert done.code == 3 and "does not fit host memory" in done.err
    assert not any("load" in call for call in engine.calls)


def test_messages_go_through_the_chat_template_and_get_one_bos(job, engine):
    messages = [{"role": "user", "content": "hi"}]
    assert job([json.dumps({"id": 1, "messages": messages})]).code == 0
    assert _call(engine, "prompts")["prompts"] == [[1, *map(ord, "userhi")]]


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
    assert rows["fits"]["text"] == "x" and len(_call(engine, "prompts")["prompts"]) == 1
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
    assert summary["load_bytes_per_s"] is None and summary["predicted"] is None
    assert not any("load" in call for call in engine.calls)


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


@pytest.mark.parametrize("when", ["loading", "running"])
def test_sigterm_keeps_finished_rows_too(job, engine, monkeypatch, when):
    def terminate(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    if when == "loading":
        monkeypatch.setattr(engine, "load", terminate)
    else:
        monkeypatch.setattr(engine, "generate", _answer_one_and(terminate))
    before = signal.getsignal(signal.SIGTERM)
    done = job([_line(1), _line(2, "two")])
    assert done.code == 143 and "moegen: stopped." in done.err and "Traceback" not in done.err
    assert not job.output.exists() and signal.getsignal(signal.SIGTERM) is before
    if when == "loading":
        assert not job.partial.exists()
    else:
        assert "out.jsonl.partial" in done.err and _rows(job.partial)[1]["text"] == "done"


def _answer_one_and(then):
    def generate(_, prompts, max_new_tokens, on_finish, on_step):
        on_finish(
            1,
            SimpleNamespace(
                text="done", prompt_tokens=3, completion_tokens=1, finish_reason="stop"
            ),
        )
        then()

    return generate


def test_a_full_disk_is_a_fault_of_the_machine(job, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
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


def _output(job):
    return Output(job.output, read_requests(job.output.with_name("in.jsonl")))


@pytest.fixture
def requests(job):
    job.output.with_name("in.jsonl").write_text(_line(1) + "\n" + _line(2) + "\n")


def _answer(id):
    return {"id": id, "text": f"answer {id}"}


def test_two_runs_do_not_write_one_output(job, requests):
    first = _output(job)
    taken = "another process is writing .*partial: wait for it, or choose another --output"
    with pytest.raises(InvalidInput, match=taken):
        _output(job)  # before the first has begun
    first.start()
    first.add(_answer(1))
    with pytest.raises(InvalidInput, match=taken):
        _output(job)
    first.add(_answer(2))
    first.finish()
    assert _rows(job.output) == [_answer(1), _answer(2)]
    with pytest.raises(InvalidInput, match="exists already"):
        _output(job)
    first.abandon()
    assert _rows(job.output) == [_answer(1), _answer(2)]


HOLDS = """
import sys
from moegen.graph.requests import read_requests
from moegen.jobs import Output

with Output(sys.argv[2], read_requests(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()  # as long as a model takes to load
"""


def test_the_later_of_two_processes_is_refused_before_it_prepares_anything(job, engine, requests):
    argv = [sys.executable, "-c", HOLDS, str(job.output.with_name("in.jsonl")), str(job.output)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "held\n"
        done = job([_line(1), _line(2)])
        assert done.code == 2 and f"another process is writing {job.partial}" in done.err
        assert engine.calls == [] and job.partial.exists()
        first.stdin.close()
        assert first.wait(30) == 0
    assert not job.partial.exists() and not job.output.exists()
    assert job([_line(1), _line(2)]).code == 0


@pytest.mark.parametrize("answered", [False, True])
def test_an_output_that_is_abandoned_before_it_starts_is_as_it_was(job, requests, answered):
    with _output(job) as output:
        if answered:
            output.start()
            output.add(_answer(1))
    before = job.partial.read_text() if answered else None
    with _output(job) as output:
        assert output.partial.exists()
    assert (job.partial.read_text() if answered else None) == before
    assert [f.name for f in job.partial.parent.glob("out*")] == ["out.jsonl.partial"] * answered


def test_an_output_that_comes_while_the_model_loads_is_not_replaced(job, requests):
    with _output(job) as output, pytest.raises(InvalidInput, match="exists already"):
        job.output.write_text("precious")
        output.start()
    assert job.output.read_text() == "precious" and not job.partial.exists()


@pytest.mark.parametrize("links", [True, False])
def test_an_output_that_comes_during_the_run_is_not_replaced(job, requests, monkeypatch, links):
    def no_links(*_):
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    output = _output(job)
    output.start()
    output.add(_answer(2))
    output.add(_answer(1))
    job.output.write_text("precious")
    with pytest.raises(InvalidInput, match="exists by now.* All answers are in .*partial"):
        output.finish()
    output.abandon()
    assert job.output.read_text() == "precious"
    assert _rows(job.partial)[1:] == [_answer(2), _answer(1)]
    names = sorted(path.name for path in job.output.parent.glob("out*"))
    assert names == ["out.jsonl", "out.jsonl.partial"]

    job.output.unlink()
    again = _output(job)
    again.start()
    for id in (1, 2):
        again.add(_answer(id))
    again.finish()
    assert _rows(job.output) == [_answer(1), _answer(2)] and not job.partial.exists()


def test_kills_lose_no_answers(job, requests):
    def killed(output):
        output._file.close()  # what the system does then

    old = job.partial.with_name("out.jsonl.partial.old")
    answered = _output(job)
    answered.start()
    answered.add(_answer(1))
    killed(answered)
    for _ in range(3):
        idle = _output(job)
        idle.start()
        idle.add({"id": 2, "error": "no answer"})
        killed(idle)
        assert _rows(old)[1:] == [_answer(1)]
    job.partial.write_text("")  # killed before the first line
    stopped = _output(job)
    stopped.start()
    assert stopped.kept == f" Rows of an earlier try are in {job.partial}."
    stopped.abandon()
    assert _rows(job.partial)[1:] == [_answer(1)] and not old.exists()


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

    if loading:
        monkeypatch.setattr(engine, "fail_loading", error)
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


def test_it_says_what_attended_on_the_cpu(job):
    done = job([_line(1)], "--json")
    assert json.loads(done.out)["cpu_attention"] == "C++ abacus, 3 threads"
    assert "  CPU      attention by C++ abacus, 3 threads" in done.err.splitlines()


def test_notes_are_warnings_when_they_arise_and_once_at_the_end(job, engine, monkeypatch):
    before, after = ["pinning will fail: no"], ["weights are not pinned: status 2", "3 not used"]
    monkeypatch.setattr(engine, "prepared_notes", before)
    monkeypatch.setattr(engine, "notes", [*before, *after, after[0]])
    done = job([_line(1)], "--json")
    assert done.code == 0 and json.loads(done.out)["notes"] == before + after
    lines = done.err.splitlines()
    for note in before + after:
        (first,) = (i for i, x in enumerate(lines) if x == f"moegen: warning: {note}")
        (last,) = (i for i, x in enumerate(lines) if x == f"  Note     {note}")
        assert first < _index(lines, "1 of 1 row answered") < last
    assert _index(lines, "moegen: warning: pinning") < _index(lines, "loading")


@pytest.mark.parametrize(
    ("load", "slower", "said"),
    [
        (8.8, 2.1, "other programs kept the cores busy (load average 8.8 on 2 cores)"),
        (8.8, 1.9, None),
        (2.0, 2.1, None),
        (None, 2.1, None),  # a system that has no load average
        (OSError(), 2.1, None),
    ],
)
def test_a_slow_run_says_if_the_machine_was_busy(job, monkeypatch, load, slower, said):
    def average():
        if isinstance(load, OSError):
            raise load
        return load, 1.0, 1.0

    if load is None:
        monkeypatch.delattr(os, "getloadavg")
    else:
        monkeypatch.setattr(os, "getloadavg", average)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    measured_s = 1.0 + 2.0  # of the fake engine's step
    times = SimpleNamespace(time_s=measured_s / slower, prefill_s=0.5, decode_s=0.5, decode_steps=1)
    monkeypatch.setattr(Report, "_estimate", lambda *_: times)
    done = job([_line(1)], "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["busy"] == said
    assert ("load average" in done.err) == (said is not None)
    assert said is None or f"           {said}\n" in done.err


@pytest.fixture
def timed(engine, monkeypatch):
    """The engine has a timeline of a decode step."""
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=1)
    graph = mg.build(model, mg.Strategy(B=2, b_a=1, b_e=4), kv_len=8)
    cost = mg.CostModel.roofline(mg.HardwareSpec.from_name("c2"))
    monkeypatch.setattr(engine, "timelines", [mg.simulate(graph, cost)])
    return engine


def test_a_timeline_that_cannot_be_saved_hides_no_result(job, timed, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write", full)
    saved = tmp_path / "t.json"
    done = job((_line(1) + "\n").encode(), "--json", "--timeline", str(saved))
    assert done.code == 1 and json.loads(done.out)["served"] == 1
    assert "1 of 1 row answered" in done.err and f"Answers  {job.output}" in done.err
    last = done.err.splitlines()[-1]
    assert last == f"moegen: cannot write the timeline to {saved}: No space left on device"
    assert [row["id"] for row in _rows(job.output)] == [1] and not saved.exists()


def test_a_saved_timeline_says_how_the_weights_lay(job, timed, monkeypatch, tmp_path):
    monkeypatch.setattr(timed, "weights", SimpleNamespace(pinned=False))
    monkeypatch.setattr(timed, "notes", ["why"])
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
    done = job([_line(1), _line(2)], "--B", "100", "--json")
    assert done.code == 0 and engine.calls[0]["plan"] == {"B": 2}
    note = "--B 100 is more than there are rows: taken as 2"
    assert f"moegen: warning: {note}" in done.err and note in json.loads(done.out)["notes"]


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


def test_a_timeline_never_lands_on_the_requests(job, tmp_path):
    (tmp_path / "in.jsonl").touch()
    (tmp_path / "link.jsonl").hardlink_to(tmp_path / "in.jsonl")
    for name in ("in.jsonl", "out.jsonl", "link.jsonl"):
        done = job([_line(1)], "--timeline", str(tmp_path / name))
        assert done.code == 2 and "file of requests or of answers" in done.err


def test_a_timeline_never_lands_in_the_checkpoint(job, tmp_path):
    done = job([_line(1)], "--timeline", str(tmp_path / "model" / "config.json"))
    assert done.code == 2 and "a folder that is read: name a file elsewhere" in done.err


@pytest.mark.parametrize("flags", [["plan", "x" * 300], ["plan", "c2", "--hw", "y" * 300]])
def test_a_name_that_is_too_long_is_said(capsys, flags):
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    assert exit_.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
