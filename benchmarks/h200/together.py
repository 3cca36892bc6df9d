"""What the link and the CPU's attention do side by side, and the least time that a step needs.

Weights by the copy engine, KV gathered by kernels and the CPU's attention share the link and host
memory. How fast each is depends on which of the others run: so all seven combinations are measured,
and the bound is the least time in which *any* mix of them does a step's work (a linear program).
A rate measured with a neighbour at work all the time would be too slow where it works some of it,
and a bound from that no bound.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attention_probe import Rows
from meters import Link, median_s
from scipy.optimize import linprog

import moegen as mg

WHO = ("weights", "gather", "attention")
MODES = tuple("+".join(x) for n in (1, 2, 3) for x in itertools.combinations(WHO, n))
Rates = dict[str, dict[str, float]]
# Left out at the beginning, where not all are at work yet; copies queued at a time.
_BEGIN_S, _AHEAD = 0.1, 4


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
    queues = {"weights": (link.copy, link.nbytes), "gather": (gather.queue, gather.nbytes)}

    def attend() -> None:
        kv.attend(engine.machinery.decode)

    for queue, _ in queues.values():
        queue()  # compiles
    attend()
    rates: Rates = {}
    for mode in MODES:
        who = mode.split("+")
        queued = {name: queues[name] for name in who if name in queues}
        attention = (attend, kv.nbytes) if "attention" in who else None
        if engine.device.type == "cuda":
            rates[mode] = side_by_side(queued, attention, span_s)
        else:  # nothing runs beside anything
            both = queued | ({} if attention is None else {"attention": attention})
            rates[mode] = {name: nbytes / median_s(do) for name, (do, nbytes) in both.items()}
    return rates


def side_by_side(
    queued: Mapping[str, tuple[Callable[[], Any], int]],
    attention: tuple[Callable[[], Any], int] | None,
    span_s: float,
) -> dict[str, float]:
    """Bytes per second of each, while all of them are at work."""
    torch.cuda.synchronize()
    base = torch.cuda.Event(enable_timing=True)
    base.record()
    base.synchronize()
    began = time.perf_counter()
    over_s = _BEGIN_S + span_s
    ends: dict[str, list[float]] = {}
    nbytes = {who: n for who, (_, n) in queued.items()}

    def feed(who: str, queue: Callable[[], Any]) -> None:
        # Some are always queued behind the one that runs.
        events = [queue() for _ in range(_AHEAD)]
        while time.perf_counter() - began < over_s + 0.05:
            events[-_AHEAD].synchronize()
            events.append(queue())
        events[-1].synchronize()
        ends[who] = [base.elapsed_time(e) / 1e3 for e in events]

    threads = [threading.Thread(target=feed, args=(who, q)) for who, (q, _) in queued.items()]
    for thread in threads:
        thread.start()
    if attention is not None:
        attend, nbytes["attention"] = attention
        ends["attention"] = []
        while not ends["attention"] or ends["attention"][-1] < over_s:
            attend()
            ends["attention"].append(time.perf_counter() - began)
    for thread in threads:
        thread.join()
    found = {}
    for who, at in ends.items():
        done = np.arange(len(at) + 1) * nbytes[who]
        moved = np.interp([_BEGIN_S, over_s], [0.0, *at], done)
        found[who] = float((moved[1] - moved[0]) / span_s)
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
