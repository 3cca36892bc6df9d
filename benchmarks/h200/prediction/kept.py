"""What is kept of a measurement: a folder of under 3 MB that everything else is made from.

    python benchmarks/h200/prediction/kept.py OUT [RESULTS]

OUT is what `measure.py` wrote. Of each run the first step is left out: it finds the machine cold,
lasts up to several times as long, and the next one is short by what was copied ahead meanwhile.
Times are rounded to a tenth of a microsecond (the clock of CUDA events has half of one), and when
inputs were ready is derived from ends again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import json
import lzma
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from judge import errors
from shapes import RAW, SHAPES, lacks

import moegen as mg
from moegen.graph.files import read_json, write_bytes, write_text

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TIMELINES = "timelines.zip"
FIRST = "first.json"
# Steps of a run that are left out, and the least that it must have.
WARM_UP, LEAST = 1, 4
_DIGITS = 7
Data = dict[str, Any]


def keep(raw: Path, folder: Path = RESULTS) -> None:
    """Make the results folder from what `measure.py` left.

    Parameters
    ----------
    raw, folder : Path

    Raises
    ------
    InvalidInput
        If nothing was measured: there is no measured.json, a file of it or a point's timeline is
        missing or damaged, or it has too few steps; or ``folder`` is a file. What was kept before
        stays then.
    """
    again = f"run measure.py {raw} again"
    measured = read(raw / "measured.json", again, RAW)
    if measured is None:
        raise mg.InvalidInput(f"{raw} has no measured.json: run measure.py {raw} first")
    for name in ("profile_notes.json", "slopes.json"):
        read(raw / name, again)
    require_folder(folder, "results go")
    packed = io.BytesIO()  # whole, before what is there is written over
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as z:
        for p in measured["points"]:
            path = raw / p["timeline"]
            if not path.exists():
                raise mg.InvalidInput(f"{path}, the timeline of {p['name']}, is missing: {again}")
            timeline = _warm(_measured_timeline(path, again))
            p["timeline"] = path.name.removesuffix(".gz")
            p["step_end_s"] = timeline.step_end_s.tolist()
            p["period_s"] = timeline.period_s
            # Of one date: the same measurement gives the same file.
            entry = zipfile.ZipInfo(p["timeline"])
            text = json.dumps(timeline.to_dict(), separators=(",", ":"))
            z.writestr(entry, text, zipfile.ZIP_LZMA)
    folder.mkdir(parents=True, exist_ok=True)
    # What was predicted was of other runs.
    for name in ("predicted.json", FIRST):
        (folder / name).unlink(missing_ok=True)
    write_bytes(folder / TIMELINES, packed.getvalue(), "the timelines")
    _write_lines(folder / "measured.json", measured)
    for name in ("profile.json", "profile_notes.json", "slopes.json"):
        (folder / name).unlink(missing_ok=True)
        if (raw / name).exists():
            (folder / name).write_bytes((raw / name).read_bytes())


class Kept:
    """A results folder, read.

    Parameters
    ----------
    folder : Path

    Attributes
    ----------
    measured : dict
        ``points``, a run each; ``failed``; ``machine``. Without points where nothing was measured.
    slopes, notes, predicted : dict or None
        Where they are there.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        empty: Data = {"points": [], "failed": []}
        self.measured: Data = read(folder / "measured.json", self._again) or empty
        for run in self.measured["points"]:
            if len(run["step_end_s"]) < LEAST - WARM_UP or not _rises(run["step_end_s"]):
                raise mg.InvalidInput(
                    f"{folder / 'measured.json'} is damaged: steps of {run['name']} end at "
                    f"{run['step_end_s']}, and there must be {LEAST - WARM_UP}, each after the one "
                    f"before: {self._again}"
                )

    @property
    def _again(self) -> str:
        return f"run measure.py OUT and kept.py OUT {self.folder}"

    @cached_property
    def slopes(self) -> Data | None:
        return read(self.folder / "slopes.json", self._again)

    @cached_property
    def notes(self) -> Data | None:
        return read(self.folder / "profile_notes.json", self._again)

    @cached_property
    def others(self) -> Data | None:
        """``measurements`` whose raw data are not kept, for what they found, and what is to be said
        ``since`` of the one that is."""
        return read(self.folder / "others.json", "it is written by hand")

    @cached_property
    def predicted(self) -> Data | None:
        return read(self.folder / "predicted.json", f"run predict.py {self.folder}")

    @cached_property
    def first(self) -> Data | None:
        """Errors by the code of the day of the measurement: ``step_median``, ``step_worst`` and
        ``per_op``. Whoever changes it later has seen the runs."""
        return read(self.folder / FIRST, "put it back: nothing can make it again")

    def require(self) -> None:
        """Refuse a folder in which nothing is kept.

        Raises
        ------
        InvalidInput
            Naming the folder, and what must be run first.
        """
        if not self.there:
            lacks = "has no measured run in its measured.json"
            if not (self.folder / "measured.json").exists():
                lacks = "has no measured.json" if self.folder.is_dir() else "is no folder"
            raise mg.InvalidInput(f"{self.folder} {lacks}: {self._again} first")

    @property
    def there(self) -> bool:
        """Whether anything was measured."""
        return bool(self.measured["points"])

    @cached_property
    def cost(self) -> mg.CostModel:
        """The calibration, on the machine that it is of."""
        return mg.CostModel.from_profile(self.folder / "profile.json", allow_mismatch=True)

    def points(self) -> Iterator[list[Data]]:
        """All runs of each point."""
        runs: dict[tuple[str, str], list[Data]] = {}
        for p in self.measured["points"]:
            runs.setdefault((p["model"], p["name"]), []).append(p)
        return iter(runs.values())

    def check_predicted(self) -> None:
        """Refuse predictions of other runs than those that were measured.

        Raises
        ------
        InvalidInput
            If a point is in one and not in the other, or has another number of runs.
        """
        assert self.predicted is not None
        runs = {(of[0]["model"], of[0]["name"]): len(of) for of in self.points()}
        told = {(p["model"], p["name"]): len(p["runs_s"]) for p in self.predicted["points"]}
        if differ := sorted(runs.items() ^ told.items()):
            (model, name), _ = differ[0]
            raise mg.InvalidInput(
                f"predicted.json and measured.json in {self.folder} are of other runs: {model} "
                f"{name} has {runs.get((model, name), 0)} measured, and "
                f"{told.get((model, name), 0)} in the predictions: run predict.py {self.folder}"
            )

    def data(self, run: Data) -> Data:
        """The timeline of a run as plain data.

        Raises
        ------
        InvalidInput
            If it is not among those that were kept, or is damaged.
        """
        path = self.folder / TIMELINES
        if not path.exists():
            raise mg.InvalidInput(f"{path}, the timelines of all runs, is missing: run kept.py")
        try:
            with zipfile.ZipFile(path) as z:
                if run["timeline"] not in z.namelist():
                    raise mg.InvalidInput(f"{path} has no {run['timeline']}: run kept.py again")
                return json.loads(z.read(run["timeline"]))
        except mg.InvalidInput:
            raise
        except _DAMAGED as e:
            raise mg.InvalidInput(f"{path} cannot be read: {_reason(e)}: {self._again}") from e

    def timeline(self, run: Data) -> mg.Timeline:
        """The timeline of a run.

        Raises
        ------
        InvalidInput
            As of :meth:`data`, or if it is no timeline.
        """
        data = self.data(run)
        try:
            return mg.Timeline.from_dict(data)
        except mg.InvalidInput as e:
            where = f"{self.folder / TIMELINES}, {run['timeline']}"
            raise mg.InvalidInput(f"{where}: {e}: {self._again}") from e

    def write(self, predicted: Data) -> None:
        """Keep what follows from the results: ``predicted.json``, and the first time its errors."""
        _write_lines(self.folder / "predicted.json", predicted)
        if not (self.folder / FIRST).exists() and (found := errors(predicted["points"])):
            _write_lines(self.folder / FIRST, found)


def _warm(timeline: mg.Timeline) -> mg.Timeline:
    """The run without its first step."""
    n = len(timeline.steps)
    if n < LEAST:
        raise mg.InvalidInput(f"{timeline!r} has {n} steps: at least {LEAST} must be measured")
    first = timeline.steps[WARM_UP]
    at = [i for i, task in enumerate(timeline.ids) if task.step >= first]
    shapes = {"shapes": timeline.meta["shapes"][WARM_UP:]} if timeline.shapes else {}
    return mg.Timeline(
        timeline.graph,
        [timeline.ids[i]._replace(step=timeline.ids[i].step - first) for i in at],
        timeline.start_s[at].round(_DIGITS),
        timeline.end_s[at].round(_DIGITS),
        source=timeline.source,
        tokens_actual=timeline.tokens_actual[at],
        provenance=[timeline.provenance[i] for i in at],
        meta=timeline.meta | shapes,
    )


# What a file that is cut short or changed raises where it is unpacked.
_DAMAGED = (
    OSError, EOFError, ValueError, NotImplementedError, zipfile.BadZipFile, lzma.LZMAError,
    zlib.error,
)  # fmt: skip


def _reason(e: BaseException) -> str:
    return str(e) or type(e).__name__


def _measured_timeline(path: Path, remedy: str) -> mg.Timeline:
    """A timeline as `measure.py` wrote it."""
    try:
        return mg.Timeline.from_dict(json.loads(gzip.decompress(path.read_bytes())))
    except _DAMAGED as e:
        raise mg.InvalidInput(f"{path} cannot be read: {_reason(e)}: {remedy}") from e


def read(path: Path, remedy: str, shape: Any = None) -> Any:
    """A JSON file of results, of the shape that its name says unless another is given; None where
    there is none.

    Raises
    ------
    InvalidInput
        If it cannot be read, has a number that is none, or lacks something.
    """
    if not path.exists():
        return None
    try:
        data = read_json(path, "the results")
    except mg.InvalidInput as e:
        raise mg.InvalidInput(f"{e}: {remedy}") from e
    if wrong := lacks(data, SHAPES[path.name] if shape is None else shape):
        raise mg.InvalidInput(f"{path} is damaged: {wrong}: {remedy}")
    return data


def _rises(values: list[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def _write_lines(path: Path, data: Data) -> None:
    """JSON with a line for each item of its lists: small, and its changes can be read."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            items = ",\n".join(json.dumps(x) for x in value)
            parts.append(f"{json.dumps(key)}: [\n{items}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n", "the results")


def require_folder(path: Path, what: str) -> None:
    """Refuse a path that cannot be a folder; ``what`` goes there.

    Raises
    ------
    InvalidInput
        If it, or what it lies in, is a file.
    """
    there = next((p for p in (path, *path.parents) if p.exists()), path)
    if there.exists() and not there.is_dir():
        raise mg.InvalidInput(f"{there} is a file, and {what} to a folder: name another")


def of_this_script(doc: str | None) -> argparse.ArgumentParser:
    """A parser that a script adds its arguments to, if it has any; its help is its docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def leaving(main: Callable[[], object]) -> None:
    """Run a script's ``main``; what it refuses is a line on stderr and an exit code."""
    try:
        main()
    except mg.MoegenError as e:
        print(f"{Path(sys.argv[0]).name}: {e}", file=sys.stderr)
        sys.exit(e.exit_code)


def main() -> None:
    p = of_this_script(__doc__)
    p.add_argument("out", type=Path)
    p.add_argument("results", type=Path, nargs="?", default=RESULTS)
    args = p.parse_args()
    keep(args.out, args.results)


if __name__ == "__main__":
    leaving(main)
