"""All commands, and what their help says of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

import moegen as mg
from moegen.cli import bench, compare, demo, profile, run, sweep, whatif
from moegen.cli.interrupt import interruptible

app = typer.Typer(
    help="Plan, predict and run offline inference of Mixture-of-Experts models "
    "larger than the GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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

    @functools.wraps(command)
    def leaving(**values: Any) -> None:
        with interruptible(str):  # also while modules are imported, before there is any work
            command(**values)

    app.command(help=text, epilog=epilog, rich_help_panel=panel)(leaving)


_PLAN, _RUN = "Plan (no weights and no GPU needed)", "Run"

_add(whatif.inspect, _PLAN)
_add(whatif.plan, _PLAN)
_add(whatif.memory, _PLAN)
_add(whatif.simulate, _PLAN)
_add(sweep.sweep, _PLAN)
_add(compare.compare, _PLAN)
_add(demo.demo, _RUN)
_add(run.run, _RUN)
_add(bench.bench, _RUN)
_add(profile.profile, _RUN)
