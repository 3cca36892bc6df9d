"""sweep(): the best plan at every point of a grid, as a tidy DataFrame."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.economics import Basis, tokens_per_joule, tokens_per_usd
from moegen.errors import Infeasible, InvalidInput
from moegen.graph.hardware import HardwareSpec
from moegen.graph.model import ModelSpec
from moegen.graph.workload import Workload
from moegen.sim.axes import STRATEGY, Axis, Grid, Point
from moegen.sim.cost import CostModel
from moegen.sim.search import plan

if TYPE_CHECKING:
    import pandas as pd

#: Numbers that are predicted of a point.
RESULTS = (
    "decode_tokens_per_s", "prefill_tokens_per_s", "throughput", "time_s", "prefill_s", "decode_s",
    "load_s",
)  # fmt: skip
#: What the throughput costs.
WORTH = ("tokens_per_usd", "tokens_per_joule")
# Results that differ by less than this share differ by rounding.
_SAME = 1e-9


def sweep(
    model: ModelSpec | None = None,
    hw: HardwareSpec | None = None,
    work: Workload | None = None,
    /,
    cost: CostModel | Callable[[HardwareSpec], CostModel] | None = None,
    *,
    n_jobs: int | None = None,
    progress: bool | Callable[[int, int], None] | None = None,
    **axes: Any,
) -> pd.DataFrame:
    """Plan a job at every point of a grid of parameters.

    At each point :func:`moegen.plan` keeps what is swept and chooses the rest anew, so that a
    curve over ω shows the best that each ω allows.

    Parameters
    ----------
    model, hw, work
        What is not swept as a whole.
    cost : CostModel or callable, optional
        Durations; by default the roofline of each point's machine. Where machines or their
        rates are swept, a function that makes the cost model of a machine.
    n_jobs : int, optional
        Processes, as joblib counts them (-1: one a core). By default what an ambient
        ``joblib.parallel_config`` says, which may name another backend (Dask, Ray), else 1.
        The frame does not depend on it.
    progress : bool or callable, optional
        A bar on stderr; by default on a terminal or in a notebook. A function is called with
        the number of points done, and of all.
    **axes
        A list of values, or one value, of any of these, in the order in which columns are
        wanted; points are their product, and the last axis varies fastest:

        - fields of decode's :class:`~moegen.Strategy`: ``omega``, ``B``, ``b_a`` ...
        - numbers of :class:`~moegen.HardwareSpec`: ``h2d_bytes_per_s``,
          ``host_memory_bytes`` ...
        - ``n``, ``prompt_len`` and ``gen_len`` of the workload, for all of its rows
        - ``model``, ``hw`` and ``work``: objects, or names of the catalogue and of presets
        - ``schedule``: names

    Returns
    -------
    DataFrame
        A row a point, with these columns:

        - what is swept; objects by name
        - ``decode_tokens_per_s``, ``prefill_tokens_per_s``, ``throughput`` (tokens generated
          over the time of the whole job), ``time_s``, ``prefill_s``, ``decode_s``, ``load_s``
        - ``binds``, ``bound_share``: the part of :class:`moegen.sim.bounds.Bound` that limits a
          decode step, and the share of the bound that is reached; ``prefill_binds`` and
          ``prefill_bound_share`` likewise
        - ``tokens_per_usd``, ``tokens_per_joule``: what ``throughput`` costs on a machine that is
          bought, as :func:`moegen.tokens_per_usd` has it, or rented if no price is known of any;
          NaN where the machine's is not known
        - what was chosen: decode's fields by their plain names, ``prefill_B``, ``prefill_b_a``
        - ``price_usd`` and ``power_w`` of the machine, NaN where unknown
        - ``notes``: what the plan says of its choice, and of knobs that do not matter at this point
        - ``error``: empty, or which line of the ledger breaks and by how much. Numbers of such
          a point are NaN

        ``attrs["notes"]`` is a list of what a reader should know of the sweep, such as a knob
        that changes nothing, which a warning says too.

    Raises
    ------
    InvalidInput
        If a parameter is unknown, has no value or one out of range, or if ``cost`` is of one
        machine and rates of machines are swept.

    Examples
    --------
    >>> mg.sweep(model, hw, work, omega=[0, 0.3, 0.6], B=3640)
    >>> mg.sweep(None, hw, work, model=["mixtral-8x7b", "deepseek-v2"], prompt_len=[128, 512])
    """
    import pandas as pd

    grid = Grid(model, hw, work, cost, axes)
    points = grid.points()
    rows = list(_followed(_evaluated(points, n_jobs, progress), len(points), progress))
    basis = _basis(points)
    for point, row in zip(points, rows, strict=True):
        row |= _worth(row["throughput"], point.hw, basis)
    frame = pd.DataFrame([{**p.shown, **row} for p, row in zip(points, rows, strict=True)])
    idle = list(_without_effect(frame, grid.axes))
    frame.attrs["notes"] = [*idle, *_notes(frame, grid.axes, points, basis)]
    for note in idle:
        warnings.warn(note, stacklevel=2)
    return frame


def _evaluated(points: Sequence[Point], n_jobs: int | None, progress: Any) -> Iterable[Any]:
    """The columns of each point, in order."""
    from joblib import Parallel, delayed

    # As they come only for somebody who watches: not every backend can.
    return_as = "list" if progress is False else "generator"
    return Parallel(n_jobs=n_jobs, return_as=return_as)(delayed(_evaluate)(p) for p in points)


def _evaluate(point: Point) -> dict[str, Any]:
    row = _nothing(point)
    try:
        found = plan(point.model, point.hw, point.work, point.cost, **point.fixed)
    except Infeasible as error:
        return row | {"error": str(error)}
    except InvalidInput as error:
        at = ", ".join(f"{name} {value}" for name, value in point.shown.items())
        raise InvalidInput(f"{error} (at {at})") from error
    assert found.binds is not None and found.bound_share is not None
    known = {name: getattr(found, name) for name in RESULTS}
    known |= found.decode.to_dict()
    for prefix, phase in (("", "decode"), ("prefill_", "prefill")):
        known[f"{prefix}binds"] = found.binds.get(phase)
        known[f"{prefix}bound_share"] = found.bound_share.get(phase)
    known |= {"prefill_B": found.prefill.B, "prefill_b_a": found.prefill.b_a}
    known["notes"] = "; ".join(found.notes)
    # A job of one token an answer has no decode, and so no rate of it.
    return row | {k: v for k, v in known.items() if k in row and v is not None}


def _nothing(point: Point) -> dict[str, Any]:
    """All columns behind the swept ones, in order, where nothing is known of a point."""
    row: dict[str, Any] = dict.fromkeys(RESULTS, np.nan)
    for prefix in ("", "prefill_"):
        row |= {f"{prefix}binds": None, f"{prefix}bound_share": np.nan}
    row |= dict.fromkeys(WORTH, np.nan)
    row |= dict.fromkeys((*STRATEGY, "prefill_B", "prefill_b_a"), np.nan) | {"fetch": None}
    for name in ("price_usd", "power_w"):
        value = getattr(point.hw, name)
        row[name] = np.nan if value is None else value
    row |= {"notes": "", "error": ""}
    return {name: value for name, value in row.items() if name not in point.shown}


def _basis(points: Sequence[Point]) -> Basis:
    """How machines are paid for in a frame, all alike: bought, if a price is known of any."""
    bought = any(p.hw.price_usd is not None and p.hw.power_w is not None for p in points)
    rented = any(p.hw.rental_usd_per_hour is not None for p in points)
    return "rent" if rented and not bought else "own"


def _worth(throughput: float, hw: HardwareSpec, basis: Basis) -> dict[str, float]:
    """What a throughput costs; NaN where the machine's price or power is not known."""
    known = hw.rental_usd_per_hour is not None
    if basis == "own":
        known = hw.price_usd is not None and hw.power_w is not None
    return {
        "tokens_per_usd": tokens_per_usd(throughput, hw, basis) if known else np.nan,
        "tokens_per_joule": np.nan if hw.power_w is None else tokens_per_joule(throughput, hw),
    }


def _followed(
    rows: Iterable[Any], total: int, progress: bool | Callable[[int, int], None] | None
) -> Iterator[Any]:
    """The same rows, while somebody is told how many there are already."""
    if callable(progress):
        for done, row in enumerate(rows, 1):
            progress(done, total)
            yield row
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if progress is None:
        progress = _has_reader(console.is_jupyter)
    yield from track(rows, "sweep", total, console=console, disable=not progress)


def _has_reader(notebook: bool) -> bool:
    if notebook:  # where rich draws with ipywidgets, and complains if they are not there
        return find_spec("ipywidgets") is not None
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _without_effect(frame: pd.DataFrame, axes: Sequence[Axis]) -> Iterator[str]:
    """Says of each axis over which no result changes, whatever the others are, that it is so."""
    names = [*RESULTS, *WORTH]
    results = frame[names].to_numpy(dtype=float)
    if np.isnan(results).all():
        return
    table = results.reshape(*(len(axis.values) for axis in axes), len(names))
    for i, axis in enumerate(axes):
        n = len(axis.values)
        first = np.take(table, [0], axis=i)
        if n > 1 and np.allclose(table, first, rtol=_SAME, atol=0, equal_nan=True):
            yield f"{axis.name} has no effect: every result is the same for all {n} values of it"


def _notes(
    frame: pd.DataFrame, axes: Sequence[Axis], points: Sequence[Point], basis: Basis
) -> Iterator[str]:
    failed = sum(error != "" for error in frame["error"])
    if failed:
        yield f"{failed} of {len(frame)} points do not fit: the column error says why"
    if basis == "rent":
        yield "tokens_per_usd is of machines that are rented: no price and power of any is known"
    swept = {axis.name: axis for axis in axes}
    link = swept.get("h2d_bytes_per_s")
    if link is None or len(link.values) < 2 or {"hw", "zero_copy_bytes_per_s"} & swept.keys():
        return
    kv = points[0].hw.zero_copy_bytes_per_s / 1e9
    yield (
        "h2d_bytes_per_s is the rate of weights; zero_copy_bytes_per_s, at which KV crosses the "
        f"link, stays at {kv:g} GB/s. For another link change both, and d2h_bytes_per_s and "
        "duplex_bytes_per_s, in a machine: hw=[hw, hw.with_(...)]"
    )
