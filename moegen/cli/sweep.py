"""``moegen sweep``: the best plan over values of parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import moegen as mg
from moegen.cli.console import Bar, print_json, warn
from moegen.cli.flags import HERE, Json, machine, naming, require_apart, require_writable
from moegen.cli.groups import WorkloadFlags, grouped
from moegen.cli.machine import Profile, measured, other_dtypes
from moegen.cli.pictures import save
from moegen.errors import Infeasible, InvalidInput
from moegen.graph.files import write_text
from moegen.parts import PARTS
from moegen.units import format_bytes, format_seconds, parse_bytes, parse_rate

if TYPE_CHECKING:
    import pandas as pd

# A range with more values than this is a slip of the pen.
_MOST = 10_000
_SIZES = {"s_expert", "s_params"}
_TEXTS = {"fetch", "schedule"}
_PICTURES = (".png", ".svg", ".pdf")


_PANEL = "Swept: each a value, a list A,B,C, or a range FROM:TO:STEP"


def _swept(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar="VALUES", help=what, rich_help_panel=_PANEL)


@dataclass(frozen=True)
class Axes:
    """What may be swept; None where a flag was not given."""

    omega: Annotated[str | None, _swept("--omega", "Share of decode attention on the CPU.")] = None
    B: Annotated[str | None, _swept("--B", "Rows in flight together.")] = None
    b_a: Annotated[str | None, _swept("--b-a", "Rows the GPU attends to at a time.")] = None
    b_e: Annotated[str | None, _swept("--b-e", "Tokens through an expert at a time.")] = None
    s_expert: Annotated[
        str | None, _swept("--s-expert", "GPU memory for experts copied ahead: 1GiB,4GiB.")
    ] = None
    s_params: Annotated[
        str | None, _swept("--s-params", "GPU memory for weights that stay there.")
    ] = None
    kv_slots: Annotated[str | None, _swept("--kv-slots", "Places for KV of --b-a rows.")] = None
    dense_slots: Annotated[
        str | None, _swept("--dense-slots", "Places for weights other than experts.")
    ] = None
    expert_group: Annotated[
        str | None, _swept("--expert-group", "Experts copied and computed as one.")
    ] = None
    fetch: Annotated[str | None, _swept("--fetch", "all, routed, or both: all,routed.")] = None
    schedule: Annotated[str | None, _swept("--schedule", "Orders of tasks: module.")] = None
    h2d_bytes_per_s: Annotated[
        str | None, _swept("--h2d", "Rate of weights over the link: 25GB/s,50GB/s.")
    ] = None
    host_memory_bytes: Annotated[
        str | None, _swept("--host-memory", "Host memory of the machine: 256GB,512GB.")
    ] = None
    gpu_memory_bytes: Annotated[
        str | None, _swept("--gpu-memory", "GPU memory of the machine: 24GB,48GB.")
    ] = None
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="NAME=VALUES",
            help="Any other number of the machine or the workload, by its name in Python, such "
            "as cpu_attn_bytes_per_s=22GB/s,44GB/s or prompt_len=128,512; may be repeated.",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def given(self, profile: str | None) -> dict[str, Any]:
        """The values of what is swept, by its name in Python."""
        found: dict[str, Any] = {}
        for field in fields(self):
            text = getattr(self, field.name)
            if field.name != "vary" and text is not None:
                found[field.name] = _values(_FLAGS[field.name], field.name, text)
        for text in self.vary or ():
            name, equals, values = text.partition("=")
            if not equals or not name.isidentifier():
                raise InvalidInput(f"--vary takes NAME=VALUES, got {text!r}")
            flag = _FLAGS.get(name, f"--vary {name}")
            if name in found:
                raise InvalidInput(f"--vary {name}: give its values once, with {flag}")
            if name in _FLAGS:
                said = f"--vary {text}: it has a flag of its own: {flag} {values}"
                if profile and name.endswith("_per_s"):
                    said += f", with --hw alone: --profile {profile} does not know another rate"
                raise InvalidInput(said)
            found[name] = _values(f"--vary {name}", name, values)
        return found


_FLAGS = {f.name: f"--{f.name.replace('_', '-')}" for f in fields(Axes) if f.name != "vary"} | {
    "h2d_bytes_per_s": "--h2d",
    "host_memory_bytes": "--host-memory",
    "gpu_memory_bytes": "--gpu-memory",
}


@grouped
def sweep(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As for moegen plan, or several: NAME,NAME.")
    ],
    axes: Axes,
    work: WorkloadFlags,
    hw: Annotated[
        str | None,
        typer.Option(
            "--hw",
            metavar="NAME|FILE",
            help="Machine, as for moegen plan, or several: c1,c2. This one unless given.",
        ),
    ] = None,
    profile: Profile = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", metavar="N", help="Processes that plan; -1 for one a core."),
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write every column here, as CSV."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw decode throughput here (.png, .svg, .pdf), with what binds.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a job for every combination of values, to see what a knob or another part is worth.

    Prints for each point tokens a second of both phases, the time of the whole job, generated
    tokens for a US dollar where the machine's price is known, the share of the bound that a
    decode step reaches, and what limits it. What is not swept is chosen anew
    at each point, as moegen plan does it. A point that does not fit stays, and says why.

    Exits with 3 if no point fits.

    Examples::

        moegen sweep mixtral-8x7b --hw c2 --omega 0:1:.1
        moegen sweep mixtral-8x7b --hw c2 --B 512,1024,2048 --omega 0,.6 --plot B.png
        moegen sweep deepseek-v2 --hw c1,c2 --host-memory 512GB:2TB:512GB -o memory.csv
        moegen sweep mixtral-8x7b --hw c2 --vary cpu_attn_bytes_per_s=22GB/s,44GB/s
        moegen sweep mixtral-8x7b --profile h200 --n 1000 --omega 0:1:.1
    """
    require_writable("--output", output)
    require_writable("--plot", plot)
    read = [x for x in (*model.split(","), *(hw or "").split(","), profile, work.workload) if x]
    require_apart({"--output": output, "--plot": plot}, read)
    if plot is not None and plot.suffix.lower() not in _PICTURES:
        raise InvalidInput(f"--plot {plot}: its name must end in one of {', '.join(_PICTURES)}")
    models = _models(model)
    rows, notes = work.read(model, models[0])
    warn(notes)
    given: dict[str, Any] = axes.given(profile)
    machines, cost = _machines(hw, profile, given)
    warn(other_dtypes(cost, models))
    if len(models) > 1:
        given["model"] = models
    if len(machines) > 1:
        given["hw"] = machines
    several = [name for name, values in given.items() if len(values) > 1]
    if plot is not None:
        _require_axes(several)
    with Bar("sweep") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are among the notes
        frame = mg.sweep(
            models[0],
            machines[0],
            rows,
            cost,
            n_jobs=jobs,
            progress=lambda done, total: bar.update(done, total, f"{done}/{total} points"),
            **given,
        )
    if as_json:
        print_json({"points": list(_plain(frame)), "notes": frame.attrs["notes"]})
    else:
        print("\n".join(_table(frame, list(given))))
    warn(frame.attrs["notes"])
    if output is not None:
        with naming("--output"):
            write_text(output, frame.to_csv(index=False), "the points")
    if all(frame["error"]):
        raise Infeasible(f"no point fits; the first {frame['error'].iloc[0]}")
    if plot is not None:
        with naming("--plot"):
            _draw(frame, several, plot)


def _models(text: str) -> list[mg.ModelSpec]:
    names = [text] if Path(text).exists() else text.split(",")
    return [mg.ModelSpec.from_pretrained(name) for name in names]


def _machines(
    hw: str | None, profile: str | None, swept: Iterable[str]
) -> tuple[list[mg.HardwareSpec], mg.CostModel | None]:
    """The machines, and what tasks take on the one that was measured."""
    text = hw or HERE
    names = [text] if Path(text).exists() else text.split(",")
    if profile is None:
        return [machine(name) for name in names], None
    if len(names) > 1:
        raise InvalidInput(f"--profile is of one machine: --hw {text} names {len(names)}")
    found, cost = measured(profile, None if hw is None else machine(text))
    rates = [name for name in swept if name in found.rates]
    if rates:
        flag = _FLAGS.get(rates[0], f"--vary {rates[0]}")
        raise InvalidInput(
            f"--profile {profile}: what was measured does not know another {rates[0]}: leave "
            f"{flag} out, or give --hw without --profile"
        )
    return [found], cost


def _values(flag: str, name: str, text: str) -> list[Any]:
    """What a flag lists: values parted by commas, each a value or a range FROM:TO:STEP."""
    with naming(flag):
        return [value for part in text.split(",") for value in _part(name, part.strip())]


def _part(name: str, text: str) -> Iterator[Any]:
    if name in _TEXTS:
        yield text
        return
    if ":" not in text:
        yield _number(name, text)
        return
    ends = [_number(name, part) for part in text.split(":")]
    if len(ends) != 3:
        raise InvalidInput(f"{text!r} is no range: write FROM:TO:STEP, such as 0:1:.1")
    first, last, step = ends
    if not (step > 0 and last >= first):
        raise InvalidInput(f"{text!r} is no range: STEP must be above 0 and TO not below FROM")
    n = math.floor((last - first) / step + 1e-9) + 1
    if n > _MOST:
        raise InvalidInput(f"{text!r} has {n} values: at most {_MOST}")
    for i in range(n):
        value = first + i * step
        yield value if isinstance(value, int) else float(f"{value:.12g}")


def _number(name: str, text: str) -> int | float:
    if name.endswith("_bytes_per_s"):
        return parse_rate(text)
    if name.endswith("_bytes") or name in _SIZES:
        return parse_bytes(text)
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidInput(f"{text!r} is no number")
    return value


def _require_axes(several: list[str]) -> None:
    numbers = [name for name in several if name not in ("model", "hw", *_TEXTS)]
    if not numbers or len(several) > 2:
        listed = ", ".join(several) or "nothing"
        raise InvalidInput(
            f"--plot needs one number with several values, and at most one more parameter with "
            f"several; got {listed}"
        )


def _draw(frame: pd.DataFrame, several: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    x = next(name for name in several if name not in ("model", "hw", *_TEXTS))
    hue = next((name for name in several if name != x), None)
    mg.plot.throughput(frame, x=x, hue=hue, ax=figure.subplots())
    save(figure, path)


def _plain(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for row in frame.to_dict("records"):
        yield {str(k): None if v is None or v != v else v for k, v in row.items()}


def _table(frame: pd.DataFrame, swept: list[str]) -> Iterator[str]:
    """A line a point, and the best of them."""
    heads = [*swept, "decode tok/s", "prefill tok/s", "job", "tok/USD", "bound", "limit of decode"]
    lines = [[_shown(name, row[name]) for name in swept] + _found(row) for row in _plain(frame)]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    for line in (heads, *lines):
        right = [text.rjust(width) for text, width in zip(line[:-1], widths, strict=False)]
        yield "  ".join([*right, line[-1]])
    fits = [row for row in _plain(frame) if not row["error"]]
    if fits and len(frame) > 1:
        best = min(fits, key=lambda row: row["time_s"])
        at = ", ".join(f"{name} {_shown(name, best[name])}" for name in swept)
        yield f"The job is done soonest, in {format_seconds(best['time_s'])}, at {at}"


def _found(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [*"-----", row["error"].partition(";")[0]]
    rates = [row["decode_tokens_per_s"], row["prefill_tokens_per_s"]]
    share, binds = row["bound_share"], row["binds"]
    return [
        *("-" if rate is None else f"{rate:,.1f}" for rate in rates),
        format_seconds(row["time_s"]),
        "-" if row["tokens_per_usd"] is None else f"{row['tokens_per_usd']:,.0f}",
        "-" if share is None else f"{share:.0%}",
        "-" if binds is None else PARTS[binds].short,
    ]


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:g} GB/s"
    if name.endswith("_bytes"):
        return f"{value / 1e9:g} GB"
    if name in _SIZES:
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
