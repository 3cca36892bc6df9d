"""The command line: a thin caller of the Python API.

Results and ``--json`` go to stdout, progress to stderr. Exit codes: 0 done, 1 a fault of the
machine, 2 wrong usage or input, 3 infeasible, 130 Ctrl-C,
143 SIGTERM.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import moegen as mg
from moegen.cli import bench, demo, run, whatif
from moegen.cli.groups import with_flags
from moegen.errors import Infeasible, MoegenError

app = typer.Typer(
    help="Plan, predict and run offline inference of Mixture-of-Experts models "
    "larger than the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``moegen`` command; always leaves through ``SystemExit``."""
    try:
        app(args=None if argv is None else list(argv), prog_name="moegen")
    except Infeasible as error:
        print(f"moegen: {with_flags(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except MoegenError as error:
        print(f"moegen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moegen {mg.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _add(command: Callable[..., None], panel: str) -> None:
    """Make a command of a function: its docstring is the help, the examples in it the end."""
    text, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples::\n")
    # rich would keep the ends of the docstring's lines.
    text = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    epilog = f"Examples:\n{examples}" if examples else None
    app.command(help=text, epilog=epilog, rich_help_panel=panel)(command)


_PLAN, _RUN = "Plan (no weights and no GPU needed)", "Run"

_add(whatif.inspect, _PLAN)
_add(whatif.plan, _PLAN)
_add(whatif.memory, _PLAN)
_add(whatif.simulate, _PLAN)
_add(demo.demo, _RUN)
_add(run.run, _RUN)
_add(bench.bench, _RUN)
