"""`mg.profile` without what takes its time: for tests of what it does with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import moegen as mg
from moegen.exec import bulk, rates, table


def here(*_, **__) -> mg.HardwareSpec:
    """This machine, its rates assumed: measuring them is another test's."""
    return replace(mg.HardwareSpec.detect(), gpu_name="none (CPU lanes)")


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Rates assumed, company left out, and a moment for each size: the table is of the same kind.

    No time is kept for what is left out.
    """
    patch.setattr(table, "machine_profile", here)
    patch.setattr(table, "company", lambda device, dtype: [])
    patch.setattr(table, "_REST_S", 0.0)
    patch.setattr(table, "_SPAN_S", 1e-3)
    patch.setattr(rates, "LINK_BYTES", 16 << 20)
    patch.setattr(bulk, "_SIZES", (1 << 14, 1 << 20))
