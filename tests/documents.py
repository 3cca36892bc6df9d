"""What is said in README and docs, taken apart so that tests can hold it to the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer.main

from moegen.cli.app import app

ROOT = Path(__file__).parents[1]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


class Document:
    """A Markdown file: its text, and its blocks of code as (language, text)."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, ROOT / name
        self.text = self.path.read_text(encoding="utf-8")
        self.blocks: list[tuple[str, str]] = re.findall(
            r"^```(\w*)\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE
        )
        self.prose = re.sub(r"^```.*?^```", "", self.text, flags=re.DOTALL | re.MULTILINE)

    def code(self, language: str) -> list[str]:
        """The blocks of one language."""
        return [text for name, text in self.blocks if name == language]

    @property
    def shell(self) -> list[str]:
        """The commands of shell blocks."""
        lines = "".join(self.code("sh")).splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]

    @property
    def moegen(self) -> list[str]:
        """Those of them that call moegen."""
        return [line for line in self.shell if line.startswith("moegen ")]

    @property
    def options(self) -> set[str]:
        """Options named in the text, in code spans that begin with one."""
        return set(re.findall(r"`(--[A-Za-z-]+)[^`]*`", self.prose))

    @property
    def make_targets(self) -> set[str]:
        """Targets of make that the shell blocks and the text name."""
        spans = re.findall(r"`(make [^`]*)`", self.prose)
        words = [
            w
            for line in [*self.shell, *spans]
            if line.startswith("make ")
            for w in line.partition("#")[0].split()[1:]
            if re.fullmatch("[a-z]+", w)
        ]
        return set(words)

    @property
    def extras(self) -> set[str]:
        """Extras of the package that are installed somewhere in it."""
        return set(
            re.findall(r"(?:pip install|constraints\.txt) '(?:\.|moegen)\[(\w+)\]'", self.text)
        )

    def broken_links(self) -> list[str]:
        """Links to files that are not there, or to headings that their file does not have."""
        broken = []
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", self.text):
            path, _, heading = link.partition("#")
            target = self.path.parent / path if path else self.path
            if not target.exists() or (heading and heading not in headings(target)):
                broken.append(link)
        return broken


def headings(path: Path) -> set[str]:
    """A Markdown file's headings as links name them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in found}


def parse(line: str) -> None:
    """Let the command line read a command's options, without running it."""
    words = shlex.split(line, comments=True)
    command = COMMANDS[words[1]]
    context = command.make_context("moegen", words[2:], resilient_parsing=False)
    assert context.command is command


def all_options() -> set[str]:
    """Every option of every command."""
    return {
        option
        for command in COMMANDS.values()
        for parameter in command.params
        for option in parameter.opts
    }
