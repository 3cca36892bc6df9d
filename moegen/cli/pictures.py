"""Pictures that commands draw, written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from moegen.graph.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Draw into a file, of the kind that its name ends in.

    Raises
    ------
    InvalidInput
        If no file may be at ``path``.
    MachineError
        If the machine cannot write it.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix.removeprefix(".").lower())
    write_bytes(path, drawn.getvalue(), "the picture")
