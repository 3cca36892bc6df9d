"""A machine's measurements as one readable file: what a kernel or a copy of some size takes.

The file is JSON::

    {"format": "moegen.profile/4",
     "date": "2026-11-30",
     "versions": {"torch": "2.11.0"},
     "dtype": "bfloat16",
     "machine": {...},
     "peaks": {"gpu_bytes_per_s": 4.8e12, "host_bytes_per_s": null},
     "curves": [
       {"ops": ["copy_dense", "copy_expert"],
        "source": "measured: pinned memory, one copy at a time",
        "axes": {"h2d_bytes": [1048576, 67108864]},
        "seconds": [3.34e-05, 0.00122],
        "phase": null,
        "spread": [0.02, 0.003],
        "issue_s": [1.4e-05, 1.5e-05],
        "turn_s": [9e-06, 9e-06],
        "more_s": null,
        "once_s": null,
        "beside_copies": null,
        "crowded": null},
       ...],
     "company": [
       {"resource": "h2d", "beside": "host_memory", "share": 0.85,
        "source": "measured: copies beside CPU attention"},
       ...],
     "latencies": {"gpu_to_host_s": 3e-05, "cpu_to_host_s": 2e-05, "gpu_to_cpu_s": 4e-05,
                   "issue_to_start_s": 3.5e-05, "issued_to_end_s": 2e-05,
                   "gpu_to_gpu_s": 8e-06, "rested_issue": 0.5, "rested_turn": 2.3}}

``machine`` is a `HardwareSpec` field by field: the names of GPU and CPU, which say whose file
this is, and the rates that hold where nothing was measured. ``peaks`` are what the data sheets
give for memory, where known (the link's and the GPU's arithmetic are in ``machine``): a
measurement above one is refused. A curve's axes are the features of its ops
(`moegen.graph.features`); ``seconds`` holds a value for every combination, the last axis
innermost, and ``spread``, where it is known, the relative standard deviation of each. An axis of
one value says which shape was measured. Seconds do not fall along the first axis, so whoever
writes a file smooths what noise turned round. ``issue_s`` is what the executor's issuing thread
takes to hand one over and ``turn_s`` what it takes for the task before that, for each value of
``seconds`` too, of a thread that is warm where ``latencies`` say what a rest costs it; ``more_s``
is what it takes for each further one of a task; ``once_s`` is what of the seconds a task takes
once, however many kernels it launches; and ``beside_copies`` and ``crowded`` are the seconds beside
copies of weights and beside zero-copy kernels (`moegen.graph.curve`). An op may have several
curves: of the widths of several models, or of one phase each (``null`` is both). ``company`` says
what a resource gives while another is in use (`moegen.graph.company`), and ``latencies``, those
that are there, how long it takes to notice that a task has ended, how long launches take to a
GPU, and how much slower the issuing thread is after a rest (`moegen.graph.latencies`); one that is
not there is 0.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.company import Company
from moegen.graph.curve import Curve
from moegen.graph.files import read_json, write_text
from moegen.graph.hardware import CPU_LANES, HardwareSpec
from moegen.graph.latencies import Latencies
from moegen.graph.peaks import check_peaks

_FAMILY = "moegen.profile/"
FORMAT = f"{_FAMILY}4"
CATALOGUE = Path(__file__).parent.parent / "data" / "profiles"
#: Seconds that measuring a table takes at most, about: two minutes with what is beyond it.
BUDGET_S = 118.0
DTYPES = ("bfloat16", "float16", "float32")
PEAKS = ("gpu_bytes_per_s", "host_bytes_per_s")
_MAY_LACK = ("phase", "spread", "issue_s", "turn_s", "more_s", "once_s", "beside_copies", "crowded")
_CURVE = ("ops", "source", "axes", "seconds", *_MAY_LACK)
_COMPANY = ("resource", "beside", "share", "source")


@dataclass(frozen=True)
class ProfileTable:
    """What was measured on a machine, and the rates that hold elsewhere.

    Parameters
    ----------
    machine : HardwareSpec
        Its names and rates.
    date : str
        Of the measurement, as 2026-11-30.
    versions : mapping of str to str
        Of what ran, by package: ``torch``, ``triton`` and so on.
    dtype : str
        Of weights and activations: bfloat16, float16 or float32.
    curves : sequence of Curve
        Several may be of one op, at other points or of another phase.
    peaks : mapping of str to float or None
        Bytes per second of memory by the data sheet: ``gpu_bytes_per_s``, ``host_bytes_per_s``.
    company : sequence of Company
        What resources give beside others; none where nobody measured it.
    latencies : Latencies
        What it takes to notice an end where no stream waits by itself, and what a rest costs the
        issuing thread.

    Raises
    ------
    InvalidInput
        If two curves are of one op and phase at the same points, two entries of the company are
        of the same resources, or a point is faster than a peak.
    """

    machine: HardwareSpec
    date: str
    versions: Mapping[str, str]
    dtype: str
    curves: tuple[Curve, ...]
    peaks: Mapping[str, float | None]
    company: tuple[Company, ...] = ()
    latencies: Latencies = Latencies()

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise InvalidInput(f"date must be like 2026-11-30, got {self.date!r}") from None
        if self.dtype not in DTYPES:
            raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        versions = self.versions
        if not isinstance(versions, Mapping) or not all(
            isinstance(text, str) and text for pair in versions.items() for text in pair
        ):
            raise InvalidInput(f"versions must map packages to versions, got {versions!r}")
        object.__setattr__(self, "versions", dict(versions))
        if not isinstance(self.peaks, Mapping):
            raise InvalidInput(f"peaks must map names to rates, got {self.peaks!r}")
        _check_keys(self.peaks, PEAKS, (), "peaks")
        peaks = {key: self.peaks.get(key) for key in PEAKS}
        known = {
            key: number(value, f"peaks: {key}", above=0)
            for key, value in peaks.items()
            if value is not None
        }
        object.__setattr__(self, "peaks", peaks | known)
        object.__setattr__(self, "curves", tuple(self.curves))
        object.__setattr__(self, "company", tuple(self.company))
        self._check_twice()
        check_peaks(self.machine, known, self.curves)

    def _check_twice(self) -> None:
        seen: set[tuple[Any, ...]] = set()
        for curve in self.curves:
            for op in curve.ops:
                points = (op, curve.phase, *curve.axes.values())
                if points in seen:
                    of = "" if curve.phase is None else f" in {curve.phase}"
                    raise InvalidInput(
                        f"two curves are of {op}{of} at the same points: no task tells them apart"
                    )
                seen.add(points)
        pairs = [(entry.resource, entry.beside) for entry in self.company]
        for i, entry in enumerate(self.company):
            if pairs[i] in pairs[:i]:
                raise InvalidInput(f"company: {entry} is there twice")

    @classmethod
    def load(cls, path: str | Path) -> ProfileTable:
        """The table in a file.

        Raises
        ------
        InvalidInput
            If the file cannot be read, is cut short, has unknown keys or lacks some, or holds
            what the classes here refuse.
        """
        data = read_json(path, "the profile")
        try:
            _check_format(data)
            keys = ("format", "date", "versions", "dtype", "machine", "peaks", "curves", "company")
            _check_keys(data, (*keys, "latencies"), keys, "the file")
            waits = data.get("latencies", {})
            if not isinstance(waits, dict):
                raise InvalidInput("latencies must hold keys and values")
            _check_keys(waits, tuple(vars(Latencies())), (), "latencies")
            machine = data["machine"]
            if not isinstance(machine, dict):
                raise InvalidInput("machine must hold keys and values")
            source = machine.get("source", {})
            if not isinstance(source, dict) or not all(isinstance(v, str) for v in source.values()):
                raise InvalidInput("machine: source must map fields to words")
            return cls(
                HardwareSpec.from_dict(machine),
                data["date"],
                data["versions"],
                data["dtype"],
                tuple(Curve(**c) for c in _entries(data, "curves", "curve", _CURVE, _MAY_LACK)),
                data["peaks"],
                tuple(Company(**c) for c in _entries(data, "company", "company", _COMPANY)),
                Latencies(**waits),
            )
        except InvalidInput as e:
            raise InvalidInput(f"{path}: {e}") from e

    @classmethod
    def from_name(cls, name: str) -> ProfileTable:
        """A table that ships with moegen; InvalidInput if there is none of this name."""
        if name not in profiles():
            raise InvalidInput(
                f"{name!r} is no profile that ships with moegen: there is {', '.join(profiles())}"
            )
        return cls.load(CATALOGUE / f"{name}.json")

    def save(self, path: str | Path) -> None:
        """Write the table; :meth:`load` gives back an equal one.

        Raises
        ------
        InvalidInput
            If no file may be at ``path``.
        MachineError
            If the machine cannot write it.
        """
        write_text(path, self.to_json(), "the profile")

    def to_json(self) -> str:
        """The file's text."""
        machine = {key: _text(value) for key, value in self.machine.to_dict().items()}
        source = {key: _text(value) for key, value in self.machine.source.items()}
        curves = [_lines({key: _text(getattr(c, key)) for key in _CURVE}, 3) for c in self.curves]
        company = [_text({key: getattr(c, key) for key in _COMPANY}) for c in self.company]
        parts = {
            "format": _text(FORMAT),
            "date": _text(self.date),
            "versions": _text(self.versions),
            "dtype": _text(self.dtype),
            "machine": _lines(machine | {"source": _lines(source, 3)}, 2),
            "peaks": _text(self.peaks),
            "curves": "[" + ",\n  ".join(curves) + "]",
            "company": "[" + ",\n  ".join(company) + "]",
            "latencies": _text({k: s for k, s in vars(self.latencies).items() if s}),
        }
        return _lines(parts, 1) + "\n"

    def check(self, hw: HardwareSpec, versions: Mapping[str, str]) -> None:
        """Refuse to stand for another machine, or for other versions.

        Names of parts agree if the words of one are among those of the other. A rate that the
        caller set in ``hw`` is another machine too: what was measured cannot know it.

        Parameters
        ----------
        hw : HardwareSpec
            The machine that is asked about.
        versions : mapping of str to str
            Versions asked about; packages that only one side names are not compared.

        Raises
        ------
        InvalidInput
            Naming what differs.
        """
        differ = [
            f"the {part} there is {getattr(self.machine, key)!r} and here {getattr(hw, key)!r}"
            for part, key in (("GPU", "gpu_name"), ("CPU", "cpu_name"))
            if not same_part(getattr(self.machine, key), getattr(hw, key))
            # On CPU lanes it does not matter which GPU there is.
            and not (part == "GPU" and self.machine.gpu_name == CPU_LANES)
        ]
        differ += [
            f"{key} there is {getattr(self.machine, key)!r} and was set to {getattr(hw, key)!r}"
            for key in hw.rates
            if hw.kind(key) == "set by the caller"
            and getattr(hw, key) != getattr(self.machine, key)
        ]
        differ += [
            f"{package} there is {version} and here {versions[package]}"
            for package, version in self.versions.items()
            if package in versions and _public(versions[package]) != _public(version)
        ]
        if differ:
            raise InvalidInput(
                f"the profile was measured on another machine or with other versions: "
                f"{'; '.join(differ)}. Measure this one, name the machine that is meant with "
                f"hw=, or pass allow_mismatch=True to take it all the same"
            )

    def installed_versions(self) -> dict[str, str]:
        """Versions here of the packages that the table names, of those that are installed."""
        found = {}
        for package in self.versions:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return found


def require_profile(name: str | Path) -> None:
    """Refuse what is neither a table that ships with moegen nor a file: InvalidInput."""
    known = profiles()
    if name in known or Path(name).is_file():
        return
    meant = [one for one in known if one == str(name).lower()]
    advice = f"Write {meant[0]}" if meant else "Make one of your machine: moegen profile -o FILE"
    raise InvalidInput(
        f"{str(name)!r} is no file, and none of {', '.join(known)}, what ships with moegen. "
        f"{advice}"
    )


def profiles() -> list[str]:
    """Names of the tables that ship with moegen."""
    return sorted(p.stem for p in CATALOGUE.glob("*.json"))


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _lines(parts: Mapping[str, str], indent: int) -> str:
    """An object of JSON with each key in a line of its own."""
    return "{" + f",\n{' ' * indent}".join(f'"{k}": {v}' for k, v in parts.items()) + "}"


def _check_format(data: Any) -> None:
    found = data.get("format") if isinstance(data, dict) else None
    if isinstance(found, str) and found != FORMAT and found.startswith(_FAMILY):
        raise InvalidInput(
            f"it is a profile of another format, {found}; this version of moegen reads {FORMAT}. "
            f"Measure the machine anew: moegen profile -o FILE"
        )
    if found != FORMAT:
        raise InvalidInput(f"this is no table of measurements ({FORMAT})")


def _check_keys(
    data: Mapping[str, Any], known: Sequence[str], needed: Sequence[str], where: str
) -> None:
    unknown = [str(key) for key in data if key not in known]
    if unknown:
        raise InvalidInput(
            f"{where} has the unknown key {unknown[0]}; known are {', '.join(known)}"
        )
    missing = [key for key in needed if key not in data]
    if missing:
        raise InvalidInput(f"{where} lacks the key {missing[0]}")


def _entries(
    data: Mapping[str, Any],
    key: str,
    what: str,
    known: Sequence[str],
    may_lack: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The objects of a list in the file, each with the keys that it must have."""
    if not isinstance(data[key], list):
        raise InvalidInput(f"{key} must be a list")
    needed = [name for name in known if name not in may_lack]
    for i, entry in enumerate(data[key]):
        if not isinstance(entry, dict):
            raise InvalidInput(f"{what} {i} must hold keys and values, got {entry!r}")
        _check_keys(entry, known, needed, f"{what} {i}")
    return data[key]


# Makers' names and what says nothing.
_NO_NAMES = {"nvidia", "geforce", "amd", "intel", "r", "tm", "cpu", "processor", "cores", "core"}


def same_part(a: str, b: str) -> bool:
    """Whether two names are of one GPU or CPU: the words of one are among those of the other."""
    words = [set(re.findall(r"[a-z0-9]+", name.lower())) - _NO_NAMES for name in (a, b)]
    less, more = sorted(words, key=len)
    return less <= more if less else a.lower() == b.lower()


def _public(version: str) -> str:
    """A version without the build's own part: ``2.11.0+cu130`` is ``2.11.0``."""
    return version.split("+")[0]
