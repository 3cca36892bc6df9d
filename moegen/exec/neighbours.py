"""Who else uses the processors while something is measured on them."""

from __future__ import annotations

import time

import psutil

# Cores that others use, of all that there are, which measurements show.
_NOTICED = 0.1
# Shorter than this, ticks of the system's clock are all that there is to count.
_LEAST_S = 1.0
# What is no use of a core; time of guests is part of a user's.
_IDLE = frozenset({"idle", "iowait", "guest", "guest_nice"})


class Neighbours:
    """Counts from when it is made what other processes, and other machines on the same host, use
    of the cores that this process may run on. Its own children count as others until they end."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        every = range(psutil.cpu_count() or 1)
        affinity = getattr(self._process, "cpu_affinity", None)  # not every system has it
        self._cores = list(affinity() if affinity is not None else every)
        self._began_s, self._others_s = time.perf_counter(), self._others()

    def cores(self) -> float:
        """How many of them they used, in the mean so far; 0 if that is too short to tell."""
        elapsed_s = time.perf_counter() - self._began_s
        if elapsed_s < _LEAST_S:
            return 0.0
        return max(0.0, (self._others() - self._others_s) / elapsed_s)

    def note(self) -> str | None:
        """What a person should know of it; None if it is next to nothing."""
        used, n = self.cores(), len(self._cores)
        if used <= _NOTICED * n:
            return None
        return (
            f"others used {used:.1f} of {n} core{'s' * (n > 1)} meanwhile: what the CPU took may "
            f"be too long, and so may what it takes to launch kernels; measure again when the "
            f"machine is idle"
        )

    def _others(self) -> float:
        """Seconds of these cores that were not this process's or its children's, so far."""
        own = self._process.cpu_times()
        own_s = own.user + own.system + own.children_user + own.children_system
        every = psutil.cpu_times(percpu=True)
        used = [every[core]._asdict() for core in self._cores if core < len(every)]
        return sum(s for times in used for what, s in times.items() if what not in _IDLE) - own_s
