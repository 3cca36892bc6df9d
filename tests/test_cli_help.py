"""``--help`` teaches: every command says what it does and shows how, in 80 columns."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from moegen.cli import main
from moegen.cli.app import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture
def shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def run(*argv):
        with pytest.raises(SystemExit):
            main(argv)
        said = capsys.readouterr()
        return said.out + said.err

    return run


def _examples(name):
    head, _, lines = (COMMANDS[name].epilog or "").partition("\n")
    assert head == "Examples:"
    return [x.strip() for x in lines.replace("\\\n", " ").splitlines() if x.strip()]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_good_commands(name):
    examples = _examples(name)
    assert examples
    for line in examples:
        words = shlex.split(line)
        assert words[:2] == ["moegen", name]
        COMMANDS[name].make_context("moegen", words[2:], resilient_parsing=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_cuts_no_word_off(shown, name):
    text = shown(name, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert "Examples:" in text
    # A word too long for its column would end in an ellipsis.
    assert "…" not in text
    for parameter in COMMANDS[name].params:
        for option in parameter.opts:
            if option.startswith("--"):
                assert f"{option} " in text


def test_alone_it_shows_the_commands_in_two_groups(shown):
    text = shown()
    plan, run = text.index("Plan ("), text.index("─ Run ")
    for name in COMMANDS:
        at = text.index(f"│ {name} ")
        group = {"demo": run, "run": run, "bench": run, "profile": run}.get(name, plan)
        assert at > group and (group == run) == (at > run)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_result_that_cannot_be_written_is_a_fault_of_the_machine():
    with open("/dev/full", "w") as full:
        done = _moegen("inspect mixtral-8x7b", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "moegen: cannot write the result: No space left on device\n"


def test_a_reader_who_has_seen_enough_is_told_nothing():
    read, write = os.pipe()
    os.close(read)
    done = _moegen("inspect mixtral-8x7b", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_while_modules_are_imported():
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from moegen.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (130, "moegen: stopped.\n")


def _moegen(line, **options):
    argv = [sys.executable, "-m", "moegen", *line.split()]
    return subprocess.run(argv, stderr=subprocess.PIPE, text=True, **options)
