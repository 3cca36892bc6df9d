"""plan(): the strategies of a job, searched: enumerate, ledger, rough period, pace, whole job.

Tens of thousands of strategies go through the ledger and get a rough period, all in arrays
(`moegen.sim.rough`). The best of them, each with the best ω for its other knobs, are run in step
(`moegen.sim.pace`), and what is near the best of those, until nothing near is better. Whole jobs of
the last few decide (`moegen.sim.job`): these are simulated, with what the issuing thread takes
(`moegen.sim.issuing`), of which what comes before knows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from moegen.errors import Infeasible, InvalidInput
from moegen.graph.bisect import greatest
from moegen.graph.hardware import HardwareSpec
from moegen.graph.many import COLUMNS, Ledgers, Strategies
from moegen.graph.memory import host_bytes, memory
from moegen.graph.model import ModelSpec, Phase
from moegen.graph.sound import saying_what_is_left_free, sound_plan, with_headroom
from moegen.graph.strategy import Plan, Rejected, Strategy
from moegen.graph.workload import Workload
from moegen.sim.cost import CostModel, checked_cost
from moegen.sim.job import JobEstimate, estimate_job
from moegen.sim.pace import periods_s
from moegen.sim.pieces import Pricer
from moegen.sim.rough import bounds_s, roughly_s
from moegen.sim.space import PREFILLS_TOO, decode_grid, near, prefill_grid
from moegen.sim.why import notes

# Of the grid so many are run in step: the best of each choice of all knobs but ω.
MOST_PACED, MOST_WAVES_PACED = 40, 16
# Steps of ω around the best, one after the other: the period is steep on both sides.
OMEGA_STEPS = (0.02, 0.002)
# Whole jobs are compared where the estimates before were as near as this; of jobs that take as
# long as each other, the one that decodes faster is taken.
NEARLY, EQUAL = 1.01, 1.002


def plan(
    model: ModelSpec,
    hw: HardwareSpec,
    work: Workload,
    cost: CostModel | None = None,
    *,
    headroom: bool = False,
    **fixed: Any,
) -> Plan:
    """Search the strategies that finish a job soonest on a machine.

    Parameters
    ----------
    cost : CostModel, optional
        ``CostModel.roofline(hw)`` unless given.
    headroom : bool
        Leave 3% of the GPU's and 5% of the host's memory free for what no ledger sees: a CUDA
        context, other processes, the page cache. For a plan that is to be run on a machine whose
        capacities are all that it has.
    **fixed
        Fields of decode's Strategy that stay as given: ``B=``, ``omega=`` and so on. Of these
        ``b_e``, ``dense_slots`` and ``expert_group`` are prefill's too.

    Returns
    -------
    Plan
        With what it is predicted to do.

    Raises
    ------
    Infeasible
        If nothing fits with what is fixed: names the ledger's section and by how much it is
        short.
    InvalidInput
        If a fixed field is unknown or no value of it can be that.
    """
    for value, kind, name in (
        (model, ModelSpec, "model"), (hw, HardwareSpec, "hw"), (work, Workload, "work"),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise InvalidInput(f"{name} must be a {kind.__name__}, got {value!r}")
    cost = CostModel.roofline(hw) if cost is None else checked_cost(cost)
    search = _Search(
        model, with_headroom(hw) if headroom else hw, work, cost, _checked(fixed),
    )  # fmt: skip
    if not headroom:
        return search.plan()
    with saying_what_is_left_free():
        return search.plan()


def _checked(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What is fixed, as a Strategy takes it."""
    known = [f.name for f in fields(Strategy)]
    unknown = fixed.keys() - set(known)
    if unknown:
        raise InvalidInput(
            f"plan() has no argument {', '.join(sorted(unknown))}: a Strategy's fields can be "
            f"fixed, which are {', '.join(known)}"
        )
    values: dict[str, Any] = {"B": 1, "b_a": 1, "b_e": 1} | dict(fixed)
    s = Strategy(**values)
    return {name: getattr(s, name) for name in fixed}


@dataclass
class _Found:
    """Strategies of a phase with seconds of a step of each, the best first."""

    s: Strategies
    step_s: np.ndarray
    job_s: np.ndarray


class _Search:
    def __init__(
        self, model: ModelSpec, hw: HardwareSpec, work: Workload, cost: CostModel,
        fixed: dict[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.hw, self.work, self.cost = model, hw, work, cost
        self.asked = dict(fixed)
        if "B" in fixed:
            fixed["B"] = min(fixed["B"], work.n)
        self.fixed = fixed
        self.ledgers = Ledgers(model, hw, work)
        self.pricers: dict[Phase, Pricer] = {
            phase: Pricer(model, cost, work, phase) for phase in ("prefill", "decode")
        }
        self.n_evaluated = 0
        self.rejected: list[Rejected] = []
        self.prefills: dict[int, Strategy] = {}
        self.step_s: dict[Strategy, float] = {}
        self.steps = max(0.0, work.gen_tokens / work.n - 1)

    def plan(self) -> Plan:
        most = self._most_rows()
        first = min(most, self.work.n)
        # What prefill takes a row, and a wave at least, whatever decode does.
        self._prefill(first)
        wave_s, self.wave_least_s, rows = self.prefill_step
        self.row_s = wave_s / rows
        found = self._decode(most)
        chosen, job = self._soonest(found)
        return self._with_gains(chosen, job, found)

    def _most_rows(self) -> int:
        """Rows that memory holds, whatever share of them the CPU attends to; those fixed if so.

        Beside the fewest, smallest slots: a GPU may hold fewer rows than the host.
        """
        kept = {k: v for k, v in self.fixed.items() if k not in ("B", "b_a")}
        least = Strategy(B=1, b_a=1, b_e=256, kv_slots=1, dense_slots=1).with_(**kept)
        memory(self.model, self.hw, least, self.work).require()
        if "B" in self.fixed:
            s = least.with_(B=self.fixed["B"])
            memory(self.model, self.hw, s, self.work).require()
            return s.B
        on_cpu = least.with_(omega=kept.get("omega", 1.0))
        most = self._most_rows_of(on_cpu, 1, self.work.n)
        return greatest(
            1, most, lambda B: memory(self.model, self.hw, least.with_(B=B), self.work).gpu.fits
        )

    def _most_rows_of(self, s: Strategy, at_least: int, at_most: int) -> int:
        def fits(B: int) -> bool:
            return host_bytes(self.model, s.with_(B=B), self.work) <= self.hw.host_memory_bytes

        return greatest(at_least, at_most, fits)

    # -- decode ------------------------------------------------------------------------------

    def _decode(self, most: int) -> _Found:
        s = self._fitting(decode_grid(self.model, self.work, most, self.fixed), "decode")
        if not len(s):
            s = self._smallest(most)
        p = self.pricers["decode"](s)
        step_s = roughly_s(p, self.cost, "decode")
        self.n_evaluated += len(s)
        job_s = self._job_s(s, step_s, bounds_s(p, self.cost, "decode")["lane BULK"])
        best = s.take(_best_of_each(s, job_s, MOST_PACED))
        self.paced = set(best.rows())  # counted already
        found = self._paced(best)
        sound = self._sound()
        for step in OMEGA_STEPS:
            bases = [_at_the_bend(found, i) for i in _apart(found)]
            bases += [self._fuller(bases[0], most), *sound]
            sound = []
            last = step == OMEGA_STEPS[-1]
            near_by = near(self.model, bases, step, self.fixed, omega_alone=last)
            more = self._fitting(near_by, None)
            if len(more):
                found = _merged(found, self._paced(more))
        return found

    def _fuller(self, s: Strategy, most: int) -> Strategy:
        """With as many rows as go in as many batches, if host memory holds them."""
        if "B" in self.fixed:
            return s
        # Host memory holds about as many, whatever the share of the CPU.
        about = (round(share * most) for share in (0.98, 1.02))
        return s.with_(B=self._most_rows_of(s, *(min(self.work.n, B) for B in about)))

    def _sound(self) -> list[Strategy]:
        """What the sound choice is, so that the search is not worse by its own measure."""
        try:
            return [sound_plan(self.model, self.hw, self.work, self.fixed).decode]
        except Infeasible:
            return []

    def _smallest(self, most: int) -> Strategies:
        """What fits though nothing of the grid did: the most rows with the smallest slots."""
        base = Strategy(B=most, b_a=1, b_e=256, kv_slots=1, dense_slots=1).with_(**self.fixed)
        memory(self.model, self.hw, base, self.work).require()
        return Strategies.of([base])

    def _fitting(self, s: Strategies, phase: Phase | None) -> Strategies:
        """Those that fit, with the weights that the rest leaves room for resident.

        Those that do not are noted, if ``phase`` says for whom.
        """
        ledgers = self.ledgers
        if "s_params" in self.fixed:
            s = s.with_(s_params=self.fixed["s_params"])
            gpu = ledgers.gpu_bytes(s)
        else:
            s, gpu = ledgers.with_most_params(s)
        host = ledgers.host_bytes(s)
        if phase is not None:
            self._reject(s, phase, host, gpu)
        return s.take((host <= self.hw.host_memory_bytes) & (gpu <= self.hw.gpu_memory_bytes))

    def _reject(
        self,
        s: Strategies,
        phase: Phase,
        host: np.ndarray,
        gpu: np.ndarray,
        batch: int | None = None,
    ) -> None:
        host_over, gpu_over = host - self.hw.host_memory_bytes, gpu - self.hw.gpu_memory_bytes
        gpu_over = np.where(host_over > 0, 0, gpu_over)  # each once
        for section, over in (("host", host_over), ("gpu", gpu_over)):
            if not (over > 0).any():
                continue
            i = int(np.where(over > 0, over, np.inf).argmin())
            example = s.strategy(i)
            ledger = memory(self.model, self.hw, example, self.work, phase=phase, batch=batch)
            short = getattr(ledger, section)
            self.rejected.append(
                Rejected(
                    phase, section, short.blamed.name, int((over > 0).sum()), -short.free_bytes,
                    example,
                )
            )  # fmt: skip

    def _paced(self, s: Strategies) -> _Found:
        p = self.pricers["decode"](s)
        step_s = periods_s(p, self.cost, "decode")
        self.n_evaluated += len(set(s.rows()) - self.paced)
        self.paced |= set(s.rows())
        job_s = self._job_s(s, step_s, bounds_s(p, self.cost, "decode")["lane BULK"])
        return _sorted(_Found(s, step_s, job_s))

    def _job_s(self, s: Strategies, step_s: np.ndarray, least_s: np.ndarray) -> np.ndarray:
        """Seconds of the job: of whole batches, and of the rows that are left."""
        full, rest = np.divmod(self.work.n, s.B)

        def prefill_s(rows: np.ndarray) -> np.ndarray:
            return np.maximum(rows * self.row_s, self.wave_least_s)

        # Fewer rows copy as many weights, and the rest is as much less.
        least_s = np.minimum(least_s, step_s)
        rest_s = least_s + (step_s - least_s) * rest / s.B
        rest_s = prefill_s(rest) + self.steps * rest_s
        return full * (prefill_s(s.B) + self.steps * step_s) + (rest > 0) * rest_s

    # -- prefill -----------------------------------------------------------------------------

    def _prefill(self, batch: int) -> Strategy:
        """The best strategy of the waves of a batch."""
        for s in self.prefills.values():
            s = s.with_(B=-(-batch // -(-batch // min(s.B, batch))))
            ledger = memory(self.model, self.hw, s, self.work, phase="prefill", batch=batch)
            if ledger.gpu.fits:
                return s
        ledgers = Ledgers(self.model, self.hw, self.work, "prefill", batch)
        s, gpu = ledgers.with_most_params(prefill_grid(self.model, self.work, batch, self.fixed))
        fits = gpu <= self.hw.gpu_memory_bytes
        self._reject(s, "prefill", np.zeros_like(gpu), gpu, batch)
        s = s.take(fits) if fits.any() else self._smallest_wave(batch)
        pricer = self.pricers["prefill"]
        self.n_evaluated += len(s)
        waves = -(-batch // s.B)
        rough_s = roughly_s(pricer(s), self.cost, "prefill")
        some = np.argsort(waves * rough_s, kind="stable")[:MOST_WAVES_PACED]
        s, waves = s.take(some), waves[some]
        p = pricer(s)
        step_s = periods_s(p, self.cost, "prefill")
        i = int((waves * step_s).argmin())
        least_s = bounds_s(p, self.cost, "prefill")["lane BULK"][i]
        self.prefill_step = float(step_s[i]), float(least_s), int(s.B[i])
        best = self.prefills[batch] = s.strategy(i)
        self.step_s[best] = float(step_s[i])
        return best

    def _smallest_wave(self, batch: int) -> Strategies:
        """One prompt at a time with the smallest slots, where nothing of the grid fits."""
        kept = {k: v for k, v in self.fixed.items() if k in PREFILLS_TOO}
        s = Strategy(B=1, b_a=1, b_e=256, kv_slots=1, dense_slots=1).with_(**kept)
        ledger = memory(self.model, self.hw, s, self.work, phase="prefill", batch=batch)
        ledger.gpu.require()
        return Strategies.of([s])

    # -- the last few ------------------------------------------------------------------------

    def _soonest(self, found: _Found) -> tuple[Plan, JobEstimate]:
        """By whole jobs, of the best and of what is nearly as good with other rows in flight."""
        chosen: dict[int, int] = {}
        for i, (B, job_s) in enumerate(zip(found.s.B.tolist(), found.job_s.tolist(), strict=True)):
            if job_s > NEARLY * found.job_s[0] or len(chosen) == 3:
                break
            chosen.setdefault(B, i)
        plans = []
        for B, i in chosen.items():
            s = Plan(prefill=self._prefill(B), decode=found.s.strategy(i))
            self.step_s[s.decode] = float(found.step_s[i])
            plans.append((self._job(s), s, B / found.step_s[i]))
        soonest = min(job.time_s for job, _, _ in plans)
        equal = [x for x in plans if x[0].time_s <= EQUAL * soonest]
        job, s, _ = max(equal, key=lambda x: x[2])
        return s, job

    def _job(self, s: Plan) -> JobEstimate:
        load = self.hw.load_bytes_per_s
        return estimate_job(self.model, s, self.work, self.cost, load_bytes_per_s=load)

    def _with_gains(self, s: Plan, job: JobEstimate, found: _Found) -> Plan:
        binds, share = {}, {}
        phases: tuple[tuple[Phase, Strategy], ...] = (("prefill", s.prefill), ("decode", s.decode))
        for phase, strategy in phases:
            p = self.pricers[phase](Strategies.of([strategy]))
            parts = {k: float(v[0]) for k, v in bounds_s(p, self.cost, phase).items()}
            binds[phase] = max(parts, key=lambda name: parts[name])
            step_s = self.step_s.get(strategy) or float(periods_s(p, self.cost, phase)[0])
            share[phase] = min(1.0, parts[binds[phase]] / step_s) if step_s else 1.0
        work = self.work
        decoded = work.gen_tokens - work.n
        return replace(
            s,
            throughput=work.gen_tokens / job.time_s,
            prefill_tokens_per_s=work.prompt_tokens / job.prefill_s,
            decode_tokens_per_s=decoded / job.decode_s if job.decode_s else None,
            time_s=job.time_s,
            prefill_s=job.prefill_s,
            decode_s=job.decode_s,
            load_s=job.load_s,
            binds=binds,
            bound_share=share,
            n_evaluated=self.n_evaluated,
            rejected=tuple(self.rejected),
            notes=notes(
                self.model, self.work, s, self.asked, binds["decode"],
                gain=self._gain(found),
            ),
        )  # fmt: skip

    def _gain(self, found: _Found) -> float | None:
        """By how much the job is shorter than without the CPU's attention, of its own length.

        None where that was not looked at.
        """
        without = found.job_s[found.s.omega == 0]
        return float(without.min() / found.job_s[0] - 1) if len(without) else None


def _best_of_each(s: Strategies, job_s: np.ndarray, most: int) -> np.ndarray:
    """Indices of the soonest: of each choice of all but ω the best alone, and some without CPU."""
    order = np.argsort(job_s, kind="stable")
    names = ("B", "b_a", "b_e", "s_expert", "kv_slots", "dense_slots", "expert_group", "fetch")
    code = np.zeros(len(s), dtype=np.int64)
    for name in names:
        values, index = np.unique(getattr(s, name), return_inverse=True)
        code = code * len(values) + index
    first = np.unique(code[order], return_index=True)[1]
    best = order[np.sort(first)][:most]
    on_gpu = order[s.omega[order] == 0][: most // 9]
    return np.unique(np.concatenate([best, on_gpu]))


def _apart(found: _Found) -> list[int]:
    """Indices of the best, and of the best with other rows in flight, and with other slots.

    From fewer slots no step of one knob leads to more slots with another ω.
    """
    indices = [0]
    for column in (found.s.B, found.s.s_expert):
        indices += np.flatnonzero(column != column[0])[:1].tolist()
    return list(dict.fromkeys(indices))


def _at_the_bend(found: _Found, i: int) -> Strategy:
    """One of the strategies, with ω where two straight lines through its neighbours' times meet.

    Over ω a step takes as long as the link does up to some share, and as the CPU does beyond.
    """
    s = found.s
    alike = np.ones(len(s), dtype=bool)
    for name in set(COLUMNS) - {"omega", "s_params"}:
        column = getattr(s, name)
        alike &= column == column[i]
    omega, job_s = s.omega[alike], found.job_s[alike]
    omega, first = np.unique(omega, return_index=True)
    job_s = job_s[first]
    at = int(job_s.argmin())
    chosen = s.strategy(i)
    if at < 2 or at > len(omega) - 3:
        return chosen
    (left, right) = ((at - 2, at - 1), (at + 1, at + 2))
    slopes = [(job_s[b] - job_s[a]) / (omega[b] - omega[a]) for a, b in (left, right)]
    if not slopes[0] < 0 < slopes[1]:
        return chosen
    a, b = left[1], right[0]
    meet = (job_s[b] - job_s[a] + slopes[0] * omega[a] - slopes[1] * omega[b]) / (
        slopes[0] - slopes[1]
    )
    return chosen.with_(omega=float(np.clip(meet, omega[a], omega[b])))


def _sorted(found: _Found) -> _Found:
    order = np.argsort(found.job_s, kind="stable")
    return _Found(found.s.take(order), found.step_s[order], found.job_s[order])


def _merged(one: _Found, other: _Found) -> _Found:
    return _sorted(
        _Found(
            Strategies.concatenate([one.s, other.s]),
            np.concatenate([one.step_s, other.step_s]),
            np.concatenate([one.job_s, other.job_s]),
        )
    )
