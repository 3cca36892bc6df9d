"""Single options that several commands share, and what becomes of their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import moegen as mg
from moegen import jobs
from moegen.errors import InvalidInput, MachineError
from moegen.graph import hardware
from moegen.graph.files import try_to_write
from moegen.graph.hardware_parts import parts
from moegen.units import parse_bytes


class DeviceName(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class DtypeName(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


HERE = "here"

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalogue name, folder, config.json or Hub id.")
]
HW_HELP = (
    f"Machine: {', '.join(hardware.catalogue())}; or its parts, such as "
    f"rtx-4090+epyc-9354+384GB; or a YAML file of yours; or {HERE} for "
    "this one: what it says of itself, and rates assumed from that."
)
Hw = Annotated[str, typer.Option("--hw", metavar="NAME|FILE", help=HW_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
Device = Annotated[
    DeviceName | None, typer.Option("--device", help="cuda if there is one, unless given.")
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16; the checkpoint's own unless given.",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory",
        metavar="SIZE",
        help="Plan for a GPU with this much memory, such as 24GiB, instead of what is free on it. "
        "A limit to plan with: nothing enforces it.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Take this much host memory as free, instead of what the machine says. This process "
        "itself must fit in it too.",
    ),
]


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Let a refusal of what a flag says begin with its name, and a fault that it leads to."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{flag}: {error}") from error
    except MachineError as error:
        raise MachineError(f"{flag}: {error}") from error


def size(flag: str, text: str | None) -> int | None:
    """Bytes of a flag such as ``8GiB``; errors name the flag."""
    if text is None:
        return None
    with naming(flag):
        return parse_bytes(text)


def machine(name: str) -> mg.HardwareSpec:
    """The machine that ``--hw`` names."""
    if name == HERE and not Path(name).exists():
        return mg.HardwareSpec.detect()
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_file():
        return mg.HardwareSpec.from_yaml(name)
    if "+" in name or name.lower() in parts("gpu"):
        with naming("--hw"):
            return mg.HardwareSpec.from_name(name)
    if name.lower() not in hardware.catalogue():
        known = ", ".join([*hardware.catalogue(), HERE])
        raise InvalidInput(
            f"--hw: {name!r} is no file, and none of {known}. For a machine of your own give its "
            f"parts, such as --hw rtx-4090+epyc-9354+384GB, or --hw FILE.yaml: a copy of "
            f"{hardware.CATALOGUE / 'c2.yaml'} "
            "with its numbers"
        )
    return mg.HardwareSpec.from_name(name)


def require_writable(flag: str, path: Path | None) -> None:
    """Refuse the path of a flag that no file can be written to."""
    if path is not None:
        with naming(flag):
            jobs.require_writable(path)
            try_to_write(path, "a file")


def require_apart(written: Mapping[str, Path | None], read: Iterable[str | Path]) -> None:
    """Refuse to write over what a command reads, or to write two things to one file.

    Of a folder that is read nobody knows which files are: nothing is written into it.
    """
    read = list(read)
    folders = [Path(path).resolve() for path in read if Path(path).is_dir()]
    taken = {place: f"{path} is read" for path in read for place in _places(Path(path))}
    for flag, path in written.items():
        if path is None:
            continue
        places = _places(path)
        if within := [folder for folder in folders if folder in path.resolve().parents]:
            raise InvalidInput(
                f"{flag}: {path} is in {within[0]}, a folder that is read: name a file elsewhere"
            )
        if found := [taken[place] for place in places if place in taken]:
            raise InvalidInput(f"{flag}: {found[0]}: name another file to write to")
        taken |= dict.fromkeys(places, f"{flag} {path} is written")


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths are one file, by links of either kind too."""
    return not set(_places(a)).isdisjoint(_places(b))


def _places(path: Path) -> list[object]:
    """What is the same of two paths to one file, by links of either kind."""
    try:
        stat = path.stat()
    except (OSError, ValueError):  # there is none yet, or it is a name and no path
        return [path.resolve()]
    return [path.resolve(), (stat.st_dev, stat.st_ino)]
