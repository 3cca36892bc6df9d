"""``moegen compare``: predicted against measured, and why they differ."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

import moegen as mg
from moegen.cli import words
from moegen.cli.console import print_json, say, warn
from moegen.cli.flags import Json, machine, naming, require_apart, require_writable
from moegen.cli.machine import measured as profile_of
from moegen.cli.machine import other_dtypes
from moegen.cli.pictures import save
from moegen.errors import InvalidInput
from moegen.graph.files import write_text


def compare(
    timelines: Annotated[
        list[Path],
        typer.Argument(
            metavar="[SIM] REAL",
            show_default=False,
            help="Timelines of one graph: the predicted one, then the measured one. With --profile "
            "or --hw only the measured one.",
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|FILE",
            help="Predict what was measured from this table of measurements: one that ships with "
            "moegen, such as h200, or a file.",
        ),
    ] = None,
    hw: Annotated[
        str | None,
        typer.Option(
            "--hw",
            metavar="NAME|FILE",
            help="Predict what was measured from a machine's rates: see moegen plan --help. Those "
            "of here are assumed; moegen profile measures.",
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write both times of every task here."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the error in its parts, and the ops."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write a trace of both here, to open in https://ui.perfetto.dev.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how wrong a prediction was: by operation, by lane, by resource, and why.

    Prints predicted and measured time of a step with the error of each operation, lane and part
    of the machine, and splits the error of the whole step into what tasks cost, what scheduling
    and contention did, and overhead that nothing explains; the three sum to it.

    moegen run and bench save what they measured with --timeline, moegen simulate what it
    predicted. With --profile or --hw in the place of SIM each measured step is predicted on what
    it really worked on. Another machine's than the run's is warned about.

    Examples::

        moegen compare real.json --profile h200
        moegen compare predicted.json real.json --plot error.png --trace both.json
    """
    written = {"--csv": csv, "--plot": plot, "--trace": trace}
    for flag, path in written.items():
        require_writable(flag, path)
    require_apart(written, [*timelines, *(name for name in (profile, hw) if name)])
    machine_, cost = _cost(profile, hw)
    if len(timelines) > 2:
        raise InvalidInput(f"two timelines are compared, and {len(timelines)} files are given")
    *before, real = timelines
    if cost is None and not before:
        raise InvalidInput(
            f"what is {real} to be compared with? Give the predicted timeline before it, or "
            f"--profile or --hw to predict what it measured"
        )
    if cost is not None and before:
        flag = "--hw" if profile is None else "--profile"
        raise InvalidInput(
            f"{flag} stands in the place of the predicted timeline: drop {before[0]}"
        )
    if plot is not None:
        _require_picture(plot)
    predicted = _load(before[0]) if cost is None else cost
    measured = _load(real)
    warn(other_dtypes(cost, [measured.graph.model]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        result = mg.compare(predicted, measured)
    warn(str(one.message) for one in said)
    if cost is not None and not result.measured_on:
        warn([f"{real} does not say which machine it was measured on: see that it is the same"])
    if as_json:
        print_json(result.to_dict())
    else:
        print(result)
        if machine_ is not None:
            print("\n".join(words.rates(machine_, "of the prediction: ")))
    if csv is not None:
        with naming("--csv"):
            write_text(csv, result.to_frame().to_csv(index=False), "the tasks")
        say(f"Tasks: {csv}")
    if plot is not None:
        figure = result.plot()[0].get_figure(root=True)
        assert figure is not None
        with naming("--plot"):
            save(figure, plot)
        say(f"Picture: {plot}")
    if trace is not None:
        with naming("--trace"):
            result.to_perfetto(trace)
        say(f"Trace: {trace}")


def _load(path: Path) -> mg.Timeline:
    try:
        return mg.Timeline.load(path)
    except InvalidInput as error:
        if str(path) in str(error):
            raise
        raise InvalidInput(f"{path}: {error}") from error


def _cost(
    profile: str | None, hw: str | None
) -> tuple[mg.HardwareSpec, mg.CostModel] | tuple[None, None]:
    """The machine to predict from, and what tasks take on it; None for a timeline in a file."""
    if profile is not None and hw is not None:
        raise InvalidInput("--profile and --hw both say what to predict from: drop one")
    if profile is not None:
        # It is the run's machine that it should be of, not this one.
        return profile_of(profile, None)
    if hw is None:
        return None, None
    of = machine(hw)
    return of, mg.CostModel.roofline(of)


def _require_picture(path: Path) -> None:
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise InvalidInput(f"--plot: {path} is no kind of picture: {', '.join(sorted(kinds))}")
