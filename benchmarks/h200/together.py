"""What the link and the CPU's attention do side by side, and the least time that a step needs.

Weights by the copy engine, KV gathered by kernels and the CPU's attention share the link and host
memory. How fast each is depends on which of the others run: so all seven combinations are measured,
and the bound is the least time in which *any* mix of them does a step's work (a linear program).
A rate measured with a neighbour at work all the time would be too slow where it works some of it,
and a bound from that no bound.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attention_probe import Rows
from meters import Link
from scipy.optimize import linprog

import moegen as mg

WHO = ("weights", "gather", "attention")
MODES = tuple("+".join(x) for n in (1, 2, 3) for x in itertools.combinations(WHO, n))
Rates = dict[str, dict[str, float]]
# Left out at the beginning, where not all are at work yet.
_BEGIN_S = 0.06


def least_s(work: Mapping[str, float], rates: Rates) -> float:
    """The least time in which a mix of modes does ``work``, bytes of each in `WHO`.

    Parameters
    ----------
    work : mapping
    rates : dict
        By mode, and in it by who takes part: bytes per second.
    """
    need = [-work.get(who, 0.0) for who in WHO]
    does = [[-rates[mode].get(who, 0.0) for mode in rates] for who in WHO]
    solved = linprog(np.ones(len(rates)), A_ub=does, b_ub=need, bounds=(0, None))
    if not solved.success:
        raise RuntimeError(f"no mix of modes does the work: {solved.message}")
    return float(solved.fun)


def work_of(g: mg.TaskGraph) -> dict[str, float]:
    """Bytes that a step moves: up the link beside gathers, by gathers, and read by the CPU."""
    work = dict.fromkeys(WHO, 0.0)
    for t in g:
        if t.work is None:
            continue
        work["gather" if t.lane is mg.Lane.KV else "weights"] += t.work.h2d_bytes
        if t.lane is mg.Lane.CPU:
            work["attention"] += t.work.host_bytes
    return work


def measure(engine: mg.Engine, kv: Rows, gather_rows: int, span_s: float = 0.4) -> Rates:
    """The rates of every mode, each over ``span_s`` seconds."""
    link, gather = Link(engine), Gather(kv, gather_rows, engine.device)
    rates: Rates = {}
    for mode in MODES:
        with_ = mode.split("+")
        queued: dict[str, tuple[Callable[[], Any], int]] = {}
        if "weights" in with_:
            queued["weights"] = link.copy, link.nbytes
        if "gather" in with_:
            queued["gather"] = gather.queue, gather.nbytes
        attend = (lambda: kv.attend(engine.machinery.decode)) if "attention" in with_ else None
        rates[mode] = side_by_side(queued, attend, kv.nbytes, span_s, engine.device)
    return rates


def side_by_side(
    queued: Mapping[str, tuple[Callable[[], Any], int]],
    attend: Callable[[], Any] | None,
    attend_bytes: int,
    span_s: float,
    device: torch.device,
) -> dict[str, float]:
    """Bytes per second of each, while all of them are at work."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    base = torch.cuda.Event(enable_timing=True) if on_gpu else None
    if base is not None:
        base.record()
    events: dict[str, list[Any]] = {who: [] for who in queued}
    # As much as the fastest could do in that time and some more, one of each by turns.
    left = {who: int(1.3 * span_s * 60e9 / nbytes) + 2 for who, (_, nbytes) in queued.items()}
    while on_gpu and any(left.values()):
        who = max(left, key=lambda w: left[w] * queued[w][1])
        events[who].append(queued[who][0]())
        left[who] -= 1
    ends: dict[str, list[float]] = {}
    nbytes = {who: n for who, (_, n) in queued.items()}
    if attend is not None:
        nbytes["attention"], ends["attention"] = attend_bytes, []
        over_s = span_s + _BEGIN_S if on_gpu else 0.0
        while not ends["attention"] or ends["attention"][-1] < over_s:
            attend()
            ends["attention"].append(time.perf_counter() - began)
    for who, (work, _) in queued.items():
        if base is None:  # nothing runs beside anything on CPU lanes
            work()
            ends[who] = [time.perf_counter() - began]
            continue
        events[who][-1].synchronize()
        ends[who] = [base.elapsed_time(e) / 1e3 for e in events[who]]
    low, high = (_BEGIN_S, span_s + _BEGIN_S) if on_gpu else (0.0, max(map(max, ends.values())))
    found = {}
    for who, at in ends.items():
        done = np.arange(len(at) + 1) * nbytes[who]
        moved = np.interp([low, high], [0.0, *at], done)
        found[who] = float((moved[1] - moved[0]) / (high - low))
    return found


class Gather:
    """A gather of KV rows as the KV lane makes it, over and over.

    Parameters
    ----------
    kv : Rows
    rows : int
        Of a micro-batch.
    device : torch.device
    """

    def __init__(self, kv: Rows, rows: int, device: torch.device) -> None:
        from moegen.exec.transfer import transfer_for

        self._transfer, self._kv = transfer_for(device), kv.store
        n = min(rows, len(kv.lengths))
        self._start = kv.start[:n].to(device)
        self._length = kv.length[:n].to(device)
        tokens = int(kv.length[:n].sum())
        self._to = torch.empty(tokens, kv.store.shape[1], dtype=kv.store.dtype, device=device)
        self._stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Of one gather."""
        return self._to.nbytes

    def queue(self) -> Any:
        """One more gather; returns what says when it is done."""
        if self._stream is None:
            self._transfer.gather(self._to, self._kv, self._start, self._length, self._start)
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._stream):
            self._transfer.gather(self._to, self._kv, self._start, self._length, self._start)
            event.record()
        return event
