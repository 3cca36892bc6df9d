"""How much host memory there is, how much of it is free, and how much this process holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moegen.errors import MachineError


def total_bytes(root: str | Path = "/") -> tuple[int, str]:
    """Bytes of the machine, or of this process's cgroup if that allows less; and who says so.

    Parameters
    ----------
    root : path
        Where ``proc`` and ``sys`` are found.

    Raises
    ------
    MachineError
        If it cannot be read.
    """
    root = Path(root)
    total, source = _meminfo(root).get("MemTotal"), "/proc/meminfo"
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total, source = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "sysconf"
    if total is None:
        raise MachineError(
            "the size of host memory cannot be read on this system: "
            "start from HardwareSpec.from_name(...).with_(host_memory_bytes=...)"
        )
    for folder, version in _cgroups(root):
        limit = _number(folder / _LIMIT[version])
        if limit is not None and limit < total:
            total, source = limit, f"cgroup v{version} limit"
    return total, source


def free_bytes(root: str | Path = "/") -> tuple[int, str]:
    """Bytes that this process can still take without swapping or being killed; and who says so.

    What the system calls available, or what is left of the limits of this process's cgroups if
    that is less. The page cache counts as free: it goes when memory is wanted.

    Raises
    ------
    MachineError
        If it cannot be read.
    """
    root = Path(root)
    free, source = _meminfo(root).get("MemAvailable"), "/proc/meminfo, MemAvailable"
    if free is None:
        free, source = total_bytes(root)
    for folder, version in _cgroups(root):
        limit, used = (_number(folder / name[version]) for name in (_LIMIT, _USAGE))
        if limit is None or used is None:
            continue
        left = max(0, limit - max(0, used - _cache_bytes(folder)))
        if left < free:
            free, source = left, f"cgroup v{version} limit less what is used"
    return free, source


def held_bytes() -> int:
    """Bytes of host memory that this process has in use now; 0 where the system cannot tell."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that :func:`held_bytes` has been; 0 where the system cannot tell."""
    peak = _status("VmHWM")
    if peak or sys.platform == "win32":
        return peak
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# Of a cgroup of either version.
_LIMIT = {2: "memory.max", 1: "memory.limit_in_bytes"}
_USAGE = {2: "memory.current", 1: "memory.usage_in_bytes"}
_CACHE = {"inactive_file", "active_file", "total_inactive_file", "total_active_file"}


def _meminfo(root: Path) -> dict[str, int]:
    """Lines of /proc/meminfo in bytes; empty where there is no such file."""
    found = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return {}
    return found


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    values = [int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{name}:")]
    return values[0] if values else 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such file, or "max": no limit there


def _cache_bytes(folder: Path) -> int:
    """Page cache that is charged to a cgroup; version 1 says it with and without children."""
    values: dict[str, int] = {}
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in _CACHE:
                values[name] = int(value)
    except (OSError, ValueError):
        return 0
    whole = sum(v for k, v in values.items() if k.startswith("total_"))
    return whole or sum(values.values())


def _cgroups(root: Path) -> list[tuple[Path, int]]:
    """Folders of the cgroups that may limit this process, its own and all above; versions."""
    v2, v1 = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    own: dict[str, str] = {}
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                own[controller] = path.strip("/")
    except (OSError, ValueError):
        own = {}
    folders = []
    for base, path, version in ((v2, own.get("", ""), 2), (v1, own.get("memory", ""), 1)):
        parts = [p for p in path.split("/") if p and p != ".."]
        folders += [(base.joinpath(*parts[:n]), version) for n in range(len(parts) + 1)]
    return folders
