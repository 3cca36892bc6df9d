"""Make the profile in the results folder the one that ships with moegen, as ``--profile h200``.

    python benchmarks/h200/prediction/ship.py

Run it whenever there is a new measurement; a test holds the shipped file to the results. All that
was measured is kept as it is: curves, company, latencies, rates, the names of GPU and CPU, date
and versions. What no profile measures is that of the catalogue's h200, so that a plan by
``--profile h200`` fits the machine that one by ``--hw h200`` fits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kept import leaving, of_this_script

from moegen.graph.hardware import HardwareSpec
from moegen.graph.hardware_parts import part
from moegen.graph.profile_table import CATALOGUE, ProfileTable

RESULT = Path(__file__).parent / "results" / "profile.json"
NAME = "h200"
SHIPPED = CATALOGUE / f"{NAME}.json"
# What the machine has, what its data sheets say of it and what it costs.
OF_THE_CATALOGUE = (
    "name", "gpu_memory_bytes", "host_memory_bytes", "gpu_flops", "gpu_workspace_bytes",
    "load_bytes_per_s", "link_peak_bytes_per_s", "price_usd", "power_w", "rental_usd_per_hour",
)  # fmt: skip


def shipped(measured: ProfileTable) -> ProfileTable:
    """The table that ships, of the one that ``moegen profile`` wrote.

    ``gpu_flops`` becomes the data sheet's, above which a point is refused, and the shares of it
    those that leave each rate of a product what was measured.

    Raises
    ------
    InvalidInput
        If it is of another machine than the catalogue's, or a point is above a peak.
    """
    hw = HardwareSpec.from_name(NAME)
    measured.check(hw, {})
    machine = measured.machine
    scale = machine.gpu_flops / hw.gpu_flops
    values = {key: getattr(hw, key) for key in OF_THE_CATALOGUE}
    values["gpu_efficiency"] = tuple((n, share * scale) for n, share in machine.gpu_efficiency)
    sources = {key: hw.source[key] for key in OF_THE_CATALOGUE if key in hw.source}
    products = machine.source["gpu_efficiency"]
    sources["gpu_efficiency"] = f"{products}; as shares of the data sheet's peak"
    known = {
        key: text
        for key, text in (machine.source | sources).items()
        if values.get(key, getattr(machine, key)) is not None
    }
    memory = part("gpu", "h200-sxm").get("gpu_bytes_per_s")
    return replace(
        measured,
        machine=replace(machine, **values, source=known),
        peaks=dict(measured.peaks) | {"gpu_bytes_per_s": memory},
    )


def main() -> None:
    of_this_script(__doc__).parse_args()
    shipped(ProfileTable.load(RESULT)).save(SHIPPED)


if __name__ == "__main__":
    leaving(main)
