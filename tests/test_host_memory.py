"""What is free, by the system and by cgroups of both versions; hand-made trees of files."""

from __future__ import annotations

import mmap

import pytest

from moegen.errors import MachineError
from moegen.graph import host_memory

GIB = 2**30
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def system(tmp_path, files, available: int | None = 40):
    lines = [f"MemTotal: {64 * 2**20} kB"]
    if available is not None:
        lines.append(f"MemAvailable: {available * 2**20} kB")
    for name, text in {"proc/meminfo": "\n".join(lines), **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def group(folder: str, limit: int | str, used: int, stat: str = "") -> dict[str, str]:
    """Files of a cgroup, sizes in GiB."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    if not folder.startswith(V1):
        names = ("memory.max", "memory.current")
    values = (limit if isinstance(limit, str) else str(limit * GIB), str(used * GIB))
    files = {f"{folder}/{name}": value for name, value in zip(names, values, strict=True)}
    return files | ({f"{folder}/memory.stat": stat} if stat else {})


def stat(**gib: int) -> str:
    return "".join(f"{name} {value * GIB}\n" for name, value in gib.items())


@pytest.mark.parametrize(
    ("cgroup", "files", "gib", "source"),
    [
        ("", {}, 40, "MemAvailable"),
        ("0::/a\n", group(f"{V2}/a", 16, 6), 10, "cgroup v2"),
        ("0::/a/b\n", group(f"{V2}/a", 16, 6) | group(f"{V2}/a/b", "max", 1), 10, "cgroup v2"),
        ("0::/a/b\n", group(f"{V2}/a", 16, 6) | group(f"{V2}/a/b", 12, 9), 3, "cgroup v2"),
        ("0::/a\n", group(f"{V2}/a", 90, 6), 40, "MemAvailable"),
        # Page cache goes when memory is wanted.
        (
            "0::/a\n",
            group(f"{V2}/a", 16, 12, stat(anon=3, inactive_file=4, active_file=5)),
            13,
            "cgroup v2",
        ),
        ("5:memory:/j\n", group(f"{V1}/j", 8, 2), 6, "cgroup v1"),
        ("5:cpu,memory:/j\n", group(f"{V1}/j", 8, 2), 6, "cgroup v1"),
        # Version 1 says it with and without the groups below.
        (
            "5:memory:/j\n",
            group(f"{V1}/j", 8, 7, stat(inactive_file=1, total_inactive_file=4)),
            5,
            "cgroup v1",
        ),
        ("0::/a\n", group(f"{V2}/a", 4, 5), 0, "cgroup v2"),
    ],
)
def test_what_is_free(tmp_path, cgroup, files, gib, source):
    root = system(tmp_path, {"proc/self/cgroup": cgroup, **files})
    free, said = host_memory.free_bytes(root)
    assert free == gib * GIB and source in said


def test_an_old_kernel_says_only_how_much_there_is(tmp_path):
    free, said = host_memory.free_bytes(system(tmp_path, {}, available=None))
    assert (free, said) == (64 * GIB, "/proc/meminfo")


def test_a_system_that_says_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory.os, "sysconf_names", {})
    with pytest.raises(MachineError, match="host memory cannot be read"):
        host_memory.free_bytes(tmp_path)


def test_what_this_process_holds_grows_and_its_peak_stays():
    before = host_memory.held_bytes()
    # Of the system itself, for what the process has freed and still holds would be taken again.
    block = mmap.mmap(-1, 64 * 2**20)
    block.write(b"\1" * len(block))  # pages are there once they are written
    held = host_memory.held_bytes()
    assert held >= before + 60 * 2**20
    block.close()
    assert host_memory.peak_bytes() >= held - 2**20  # the kernel counts in batches
    assert host_memory.held_bytes() < held
