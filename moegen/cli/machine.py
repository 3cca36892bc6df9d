"""The machine that a prediction is for, and what it rests on: ``--hw`` and ``--profile``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import typer

import moegen as mg
from moegen.cli.flags import HERE, HW_HELP, machine, naming
from moegen.errors import InvalidInput
from moegen.graph.profile_table import DTYPES, ProfileTable, profiles, require_profile

Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help=f"What was measured on the machine, for the rates: {', '.join(profiles())}, or a "
        "file. Without --hw its own machine is taken, with that one's memory.",
    ),
]


@dataclass(frozen=True)
class MachineFlags:
    """``--hw`` and ``--profile``; None where one was not given."""

    hw: Annotated[
        str | None,
        typer.Option("--hw", metavar="NAME|FILE", help=f"{HW_HELP} That one unless given."),
    ] = None
    profile: Profile = None

    @property
    def here(self) -> bool:
        """Whether it is this machine."""
        return self.hw == HERE or (self.hw is None and self.profile is None)

    def read(self) -> tuple[mg.HardwareSpec, mg.CostModel]:
        """The machine, and what tasks take on it."""
        hw = None if self.hw is None and self.profile else machine(self.hw or HERE)
        if self.profile is None:
            assert hw is not None
            return hw, mg.CostModel.roofline(hw)
        return measured(self.profile, hw)


def measured(profile: str, hw: mg.HardwareSpec | None) -> tuple[mg.HardwareSpec, mg.CostModel]:
    """What a profile says of a machine, its own unless one is given."""
    with naming("--profile"):
        require_profile(profile)
        if hw is None:
            table = ProfileTable.from_name(profile) if profile in profiles() else None
            hw = (table or ProfileTable.load(profile)).machine
        try:
            return hw, mg.CostModel.from_profile(profile, hw=hw)
        except InvalidInput as error:
            raise InvalidInput(_with_flags(str(error))) from error


def other_dtypes(cost: mg.CostModel | None, models: Iterable[mg.ModelSpec | None]) -> list[str]:
    """What to know where a model's dtype is not the one that a profile was measured in."""
    table: ProfileTable | None = getattr(cost, "table", None)
    if table is None:
        return []
    return [
        f"the profile was measured in {table.dtype} and {m.name} is {m.dtype}: its kernels take "
        f"another time"
        + (f". Measure that with moegen profile --dtype {m.dtype}" if m.dtype in DTYPES else "")
        for m in models
        if m is not None and m.dtype != table.dtype
    ]


def _with_flags(text: str) -> str:
    """A refusal of another machine, with the flags of a command for words of Python."""
    head, known, _ = text.partition(" Measure this one, name the machine that is meant with hw=")
    return f"{head} Leave --hw out to take the machine of the profile" if known else text
