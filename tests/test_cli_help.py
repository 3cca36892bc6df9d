"""``--help`` teaches: every command says what it does and shows how, in 80 columns."""

from __future__ import annotations

import shlex

import pytest
import typer.main

from moegen.cli import app, main

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
        group = {"demo": run, "run": run, "bench": run}.get(name, plan)
        assert at > group and (group == run) == (at > run)
