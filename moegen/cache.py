"""Where moegen keeps what it can make again: the demo checkpoint, machine profiles."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """moegen's folder in the user's cache directory; it need not exist yet.

    ``XDG_CACHE_HOME`` decides where it is set to an absolute path, on every system; a relative
    one is ignored, as its specification asks.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named / "moegen"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "moegen"
    return Path(os.environ.get("LOCALAPPDATA") or Path.home() / ".cache") / "moegen"
