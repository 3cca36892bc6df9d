"""What a run was meant to do, what it did, and how the two compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moegen.graph import host_memory
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import Ledger
from moegen.jobs.encoded import Job
from moegen.jobs.run import Summary

if TYPE_CHECKING:
    from moegen.exec.engine import Engine
    from moegen.exec.prepare import Prepared, Resolved
    from moegen.sim.job import JobEstimate

# A run that takes so many times what was predicted is asked why.
SLOW = 2.0


@dataclass
class Report:
    """A run from its plan to its end; what has not happened yet is None.

    Attributes
    ----------
    prepared : Prepared
    job : Job
    resolved : Resolved or None
        None if no request can be answered.
    expected : JobEstimate or None
        Made before the run: every answer as long as it may be.
    before_bytes : int
        The most host memory that the process held before loading: measuring a machine for the
        first time takes some, and gives it back.
    load_s, load_bytes : float, int
    summary : Summary or None
    predicted : JobEstimate or None
        Made after the run, by the same model, for the lengths that came out.
    peak : dict
        The most bytes that were held: ``host`` by the process, ``gpu`` (None on CPU lanes).
    cpu_attention : str or None
        What did the CPU's decode attention.
    busy : str or None
        Where the run took twice the time predicted or more: that other programs kept the cores
        busy, if the system's load average says so.
    notes : list of str
        Fallbacks taken, each once.
    """

    prepared: Prepared
    job: Job
    resolved: Resolved | None = None
    expected: JobEstimate | None = None
    before_bytes: int = 0
    load_s: float = 0.0
    load_bytes: int = 0
    summary: Summary | None = None
    predicted: JobEstimate | None = None
    peak: dict[str, int | None] = field(default_factory=dict)
    cpu_attention: str | None = None
    busy: str | None = None
    notes: list[str] = field(default_factory=list)

    def resolve(self) -> Resolved:
        """Choose the plan, and estimate how long the job takes by it.

        Raises
        ------
        Infeasible
            If nothing fits; nothing has been loaded then.
        """
        self.prepared.require_weights()  # before the machine is measured for a plan
        self.resolved = self.prepared.resolve(self.job.work)
        self.expected = self._estimate(self.job.limits)
        self.before_bytes = host_memory.peak_bytes()
        return self.resolved

    def finish(self, engine: Engine | None, summary: Summary) -> None:
        """Take down what the run did."""
        self.summary = summary
        if engine is not None:
            self.peak = engine.memory_peak()
            self.cpu_attention = engine.cpu_attention
            self.note(engine.notes)
            self.predicted = self._estimate(summary.gen_lens)
            if self.measured_s >= SLOW * self.predicted.time_s:
                self.busy = _busy()

    def note(self, notes: Sequence[str]) -> list[str]:
        """Add notes; gives those that are new."""
        new = [note for note in dict.fromkeys(notes) if note not in self.notes]
        self.notes += new
        return new

    def _estimate(self, gen_lens: Sequence[int]) -> JobEstimate:
        from moegen.sim.cost import CostModel
        from moegen.sim.job import estimate_job  # loads pandas: not for every command

        assert self.resolved is not None
        return estimate_job(
            self.prepared.model,
            self.resolved.plan,
            (self.job.prompt_lens, gen_lens),
            CostModel.roofline(self.prepared.hardware),
        )

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU; on CPU lanes its buffers lie in host memory."""
        return self.prepared.device.type == "cuda"

    @property
    def measured_s(self) -> float:
        """Seconds of both phases, which is what was predicted."""
        return 0.0 if self.summary is None else self.summary.prefill_s + self.summary.decode_s

    @property
    def error(self) -> float | None:
        """Predicted time over measured, less 1; negative where the prediction was too short."""
        if self.predicted is None or not self.measured_s:
            return None
        return self.predicted.time_s / self.measured_s - 1

    @property
    def memory(self) -> dict[str, dict[str, int | None]]:
        """Bytes planned (of the phase that needs more), bytes there are, and the peak."""
        if self.resolved is None:
            return {}
        ledgers = (self.resolved.prefill, self.resolved.decode)
        table: dict[str, dict[str, int | None]] = {}
        for name in ("host", "gpu"):
            sections = [getattr(ledger, name) for ledger in ledgers]
            table[name] = {
                "planned_bytes": max(s.total_bytes for s in sections),
                "capacity_bytes": sections[0].capacity_bytes,
                "peak_bytes": self.peak.get(name),
            }
        in_host = max(self._in_host(ledger) for ledger in ledgers)
        table["host"]["in_host_bytes"] = max(in_host, self.before_bytes)
        return table

    def _in_host(self, ledger: Ledger) -> int:
        return ledger.host.total_bytes + (0 if self.on_gpu else ledger.gpu.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON. ``memory.host.in_host_bytes`` is what a peak compares with."""
        plan = memory = rates = None
        if self.resolved is not None:
            plan = {
                "prefill": self.resolved.plan.prefill.to_dict(),
                "decode": self.resolved.plan.decode.to_dict(),
            }
            memory, rates = self.memory, machine(self.prepared.hardware)
        rate = self.load_bytes / self.load_s if self.load_s else None
        return {
            **({} if self.summary is None else self.summary.to_dict()),
            "load_s": self.load_s,
            "load_bytes": self.load_bytes,
            "load_bytes_per_s": rate,
            "cpu_attention": self.cpu_attention,
            "busy": self.busy,
            "notes": list(self.notes),
            "device": self.prepared.device.type,
            "dtype": self.prepared.model.dtype,
            "plan": plan,
            "memory": memory,
            "expected": _times(self.expected),
            "predicted": _times(self.predicted),
            "predicted_error": self.error,
            "machine": rates,
        }


def _busy() -> str | None:
    """That other programs kept the cores busy; None where not, or where the system is silent."""
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    try:
        load = os.getloadavg()[0]
    except OSError:  # the system cannot say
        return None
    n = os.cpu_count() or 1  # of the machine, as the load is, and not of this process
    if load <= n:
        return None
    there = f"{n} core{'' if n == 1 else 's'}"
    return f"other programs kept the cores busy (load average {load:.1f} on {there})"


def _times(estimate: JobEstimate | None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {name: getattr(estimate, name) for name in ("time_s", "prefill_s", "decode_s")}


def machine(hw: HardwareSpec) -> dict[str, Any]:
    """A machine's names, and its rates with where they come from."""
    rates = {
        name: {"value": getattr(hw, name), "source": hw.source.get(name, "no source")}
        for name in hw.rates
    }
    return {"name": hw.name, "gpu_name": hw.gpu_name, "cpu_name": hw.cpu_name, "rates": rates}
