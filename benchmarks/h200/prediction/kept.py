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
import hashlib
import io
import itertools
import json
import lzma
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import judge
import numpy as np
from shapes import SHAPES, lacks

import moegen as mg
from moegen.graph.files import read_json, write_bytes, write_text

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TIMELINES = "timelines.zip"
FIRST = "first.json"
# By a point's errors in two predictions that are the same but for rounding.
SAME = 1e-6
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
        If nothing was measured: there is no measured.json or profile.json, a file or a point's
        timeline is missing or damaged, or it has too few steps; or ``folder`` is a file. What was
        kept before stays then.
    """
    again = f"run measure.py {raw} again"
    measured = read(raw / "measured.json", again)
    for name, there in (("measured", measured), ("profile", (raw / "profile.json").exists())):
        if not there:
            raise mg.InvalidInput(f"{raw} has no {name}.json: run measure.py {raw} first")
    mg.CostModel.from_profile(raw / "profile.json", allow_mismatch=True)
    for name in ("profile_notes.json", "slopes.json"):
        read(raw / name, again)
    require_folder(folder, "results go")
    _require_points(raw, measured, again)
    packed = io.BytesIO()  # whole, before what is there is written over
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as z:
        for p in measured["points"]:
            path = raw / p["timeline"]
            if not path.exists():
                raise mg.InvalidInput(f"{path}, the timeline of {p['name']}, is missing: {again}")
            timeline = _measured_timeline(path, again)
            _require_run_of(p, timeline, f"{path}", again)
            timeline = _warm(timeline)
            p["timeline"] = path.name.removesuffix(".gz")
            p["step_end_s"] = timeline.step_end_s.tolist()
            p["period_s"] = timeline.period_s
            # Of one date: the same measurement gives the same file.
            entry = zipfile.ZipInfo(p["timeline"])
            text = json.dumps(timeline.to_dict(), separators=(",", ":"))
            z.writestr(entry, text, zipfile.ZIP_LZMA)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kept-", dir=folder) as whole:
        fresh = Path(whole)
        write_bytes(fresh / TIMELINES, packed.getvalue(), "the timelines")
        _write_lines(fresh / "measured.json", measured)
        for name in ("profile.json", "profile_notes.json", "slopes.json"):
            if (raw / name).exists():
                write_bytes(fresh / name, (raw / name).read_bytes(), "the results")
        # What was predicted was of other runs; but who keeps the same ones again has seen them.
        seen = all(_alike(folder / x, fresh / x) for x in ("measured.json", "profile.json"))
        stale = {"predicted.json", "profile_notes.json", "slopes.json", *(() if seen else (FIRST,))}
        for name in stale:
            (folder / name).unlink(missing_ok=True)
        for path in fresh.iterdir():
            path.replace(folder / path.name)


def code() -> str:
    """Which code of moegen this is: a digest of its sources."""
    package = Path(mg.__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def _alike(a: Path, b: Path) -> bool:
    return a.exists() and a.read_bytes() == b.read_bytes()


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
        """What was predicted first, when nobody had seen how far predictions were off.

        ``code`` that predicted, ``errors`` of the drawn points, and of them ``step_median``,
        ``step_worst`` and ``per_op``.
        """
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
            If a point is in one and not in the other, or has another number of runs, or steps that
            took something else.
        """
        assert self.predicted is not None
        every = {(of[0]["model"], of[0]["name"]): of for of in self.points()}
        runs = {key: len(of) for key, of in every.items()}
        told = {(p["model"], p["name"]): len(p["runs_s"]) for p in self.predicted["points"]}
        if differ := sorted(runs.items() ^ told.items()):
            (model, name), _ = differ[0]
            raise mg.InvalidInput(
                f"predicted.json and measured.json in {self.folder} are of other runs: {model} "
                f"{name} has {runs.get((model, name), 0)} measured, and "
                f"{told.get((model, name), 0)} in the predictions: run predict.py {self.folder}"
            )
        for p in self.predicted["points"]:
            took_s = [judge.step_s(run["step_end_s"]) for run in every[p["model"], p["name"]]]
            if not np.allclose(took_s, p["runs_s"], rtol=SAME):
                raise mg.InvalidInput(
                    f"predicted.json and measured.json in {self.folder} are of other runs: steps "
                    f"of {p['model']} {p['name']} took {took_s} s, and {p['runs_s']} s in the "
                    f"predictions: run predict.py {self.folder}"
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
            raise mg.InvalidInput(f"{path}, the timelines of all runs, is missing: {self._again}")
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
            As of :meth:`data`, or if it is no timeline, or that of another run.
        """
        data = self.data(run)
        where = f"{self.folder / TIMELINES}, {run['timeline']}"
        try:
            timeline = mg.Timeline.from_dict(data)
        except mg.InvalidInput as e:
            raise mg.InvalidInput(f"{where}: {e}: {self._again}") from e
        _require_run_of(run, timeline, where, self._again)
        return timeline

    def write(self, predicted: Data) -> None:
        """Keep what follows from the results: ``predicted.json``, and the first time its errors.

        Raises
        ------
        InvalidInput
            If there are predictions already, and what the first ones found is not there.
        """
        again = (self.folder / "predicted.json").exists()
        if again and self.first is None:
            raise mg.InvalidInput(
                f"{self.folder / FIRST} is missing, and predicted.json is not: what was predicted "
                f"first cannot be found again. Put it back; or delete predicted.json, and what is "
                f"predicted now is first"
            )
        _write_lines(self.folder / "predicted.json", predicted)
        if self.first is None and (found := judge.errors(predicted["points"])):
            _write_lines(self.folder / FIRST, {"code": code(), **found})
        for name in ("predicted", "first"):  # what was read before
            self.__dict__.pop(name, None)


def _require_points(raw: Path, measured: Data, remedy: str) -> None:
    """Refuse a measurement without runs, and runs that have a name, or a timeline, in common."""
    if not measured["points"]:
        raise mg.InvalidInput(f"{raw / 'measured.json'} has no measured run: {remedy}")
    seen: set[Any] = set()
    for p in measured["points"]:
        for key in ((p["model"], p["name"], p["run"]), p["timeline"]):
            if key in seen:
                raise mg.InvalidInput(
                    f"{raw / 'measured.json'} is damaged: run {p['run']} of {p['name']} is there "
                    f"twice, or its timeline {p['timeline']} is another's, too: {remedy}"
                )
            seen.add(key)


def _require_run_of(run: Data, timeline: mg.Timeline, where: str, remedy: str) -> None:
    """Refuse a timeline that is not the one of a run."""
    model, s = timeline.graph.model, timeline.graph.strategy
    found = {
        "a run": timeline.source == "measured",
        f"{run['layers']} layers of {run['model']}": model is not None
        and (model.name, model.n_layers) == (run["model"], run["layers"]),
        f"the strategy of {run['name']}": s is not None
        and all(getattr(s, key, None) == x for key, x in run["strategy"].items()),
        "these steps": len(timeline.step_end_s) == len(run["step_end_s"])
        and np.allclose(timeline.step_end_s, run["step_end_s"], rtol=0, atol=10**-_DIGITS),
    }
    if wrong := [what for what, is_so in found.items() if not is_so]:
        raise mg.InvalidInput(
            f"{where} is not the timeline of {run['model']} {run['name']}, run {run['run']}: it is "
            f"not of {wrong[0]}: {remedy}"
        )


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


def read(path: Path, remedy: str) -> Any:
    """A JSON file of results, of the shape that its name says; None where there is none.

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
    if wrong := lacks(data, SHAPES[path.name]):
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
