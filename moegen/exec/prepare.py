"""What is known before weights are loaded: the model, the machine, and whether the plan fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moegen.errors import Infeasible, InvalidInput
from moegen.exec.checkpoint import Checkpoint
from moegen.exec.decode_attention import attention_kind
from moegen.exec.families import family_for
from moegen.exec.families.base import Family
from moegen.exec.kernels.triton_util import require_triton
from moegen.exec.lanes import free_gpu_memory
from moegen.exec.loading import checked_device, load_tokenizer, torch_dtype
from moegen.exec.pinning import locking_problem
from moegen.exec.weights import HostWeights, require_tensors
from moegen.graph import host_memory
from moegen.graph.checks import whole
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import Ledger, memory
from moegen.graph.model import ModelSpec
from moegen.graph.sizes import packed_bytes
from moegen.graph.sound import sound_plan, sound_prefill
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.workload import Workload
from moegen.units import MIB, format_bytes

if TYPE_CHECKING:
    from moegen.exec.engine import Engine

# What CUDA's libraries, and Triton's compiler, add to the process once they are in use: measured
# on an H200 machine with torch 2.11.
CUDA_GROWTH_BYTES = 768 * MIB

LARGEST_WORKSPACE_BYTES = 32 * MIB  # of cuBLAS on any GPU, as torch asks for it

Given = Plan | Strategy | Mapping[str, Any] | str


@dataclass(frozen=True)
class Resolved:
    """A plan for a workload, and what it puts into memory in each phase."""

    plan: Plan
    prefill: Ledger
    decode: Ledger


@dataclass
class Prepared:
    """A model and a machine, before any weight is loaded.

    Attributes
    ----------
    model : ModelSpec
        With the dtype that it runs in.
    device : torch.device
    tokenizer
        The checkpoint's, or None.
    capacities : HardwareSpec
        The machine as it describes itself, its memories as this process may use them.
    given : Plan, Strategy, mapping or "auto"
        What of the plan is fixed.
    process_bytes : int
        Host memory of this process beside weights and KV: what it held before loading, and what
        CUDA's libraries will add.
    notes : list of str
        What a person should know before the weights are loaded.
    """

    model: ModelSpec
    family: Family
    device: torch.device
    capacities: HardwareSpec
    given: Given = "auto"
    tokenizer: Any = None
    path: Path | None = None
    threads: int | None = None
    process_bytes: int = 0
    rates: HardwareSpec | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def checkpoint(
        cls,
        path: str | Path,
        plan: Given = "auto",
        *,
        device: str | None = None,
        dtype: str | None = None,
        gpu_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        hardware: HardwareSpec | None = None,
        threads: int | None = None,
    ) -> Prepared:
        """See :meth:`Engine.prepare`."""
        check_arguments(plan, threads)
        where, machine = checked_device(device), _machine(gpu_memory_bytes, host_memory_bytes)
        spec = ModelSpec.from_pretrained(path)
        if dtype is not None:
            spec = spec.with_(dtype=dtype)
        family = family_for(spec, torch_dtype(spec, dtype), where)
        require_tensors(Checkpoint(path), spec, family)
        tokenizer = load_tokenizer(path)
        return cls._on_this_machine(
            spec,
            family,
            where,
            machine,
            given=plan,
            tokenizer=tokenizer,
            path=Path(path),
            threads=threads,
            rates=hardware,
        )

    @classmethod
    def of_model(
        cls,
        model: ModelSpec,
        plan: Given = "auto",
        *,
        device: str | None = None,
        dtype: str = "bfloat16",
        gpu_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        hardware: HardwareSpec | None = None,
        threads: int | None = None,
    ) -> Prepared:
        """The same for weights that are made up: see :meth:`Engine.random`."""
        check_arguments(plan, threads)
        where, machine = checked_device(device), _machine(gpu_memory_bytes, host_memory_bytes)
        model = model.with_(dtype=dtype)
        family = family_for(model, torch_dtype(model, dtype), where)
        return cls._on_this_machine(
            model, family, where, machine, given=plan, threads=threads, rates=hardware
        )

    @classmethod
    def _on_this_machine(
        cls,
        model: ModelSpec,
        family: Family,
        device: torch.device,
        machine: tuple[HardwareSpec, dict[str, int]],
        **rest: Any,
    ) -> Prepared:
        if device.type == "cuda":
            require_triton()
        attention_kind()  # compiled now, and refused now where a variant is asked for in vain
        held_bytes = host_memory.held_bytes()
        growth_bytes = CUDA_GROWTH_BYTES if device.type == "cuda" else 0
        hw = _capacities(model, device, *machine, held_bytes, growth_bytes)
        made = cls(model, family, device, hw, process_bytes=held_bytes + growth_bytes, **rest)
        if device.type == "cuda":
            problem = locking_problem(packed_bytes(model))
            if problem is not None:
                made.notes.append(f"pinning will fail: {problem}")
        return made

    @cached_property
    def hardware(self) -> HardwareSpec:
        """The machine with its rates: those given, else measured, once on each machine."""
        from moegen.exec.profile import machine_profile  # it runs an Engine itself

        known = self.rates or machine_profile(self.device, self.family.dtype, notes=self.notes)
        memories = ("gpu_memory_bytes", "host_memory_bytes", "gpu_workspace_bytes")
        source = known.source | {name: self.capacities.source.get(name, "") for name in memories}
        held = {name: getattr(self.capacities, name) for name in memories}
        return replace(known, **held, source=source)

    def with_plan(self, plan: Given) -> Prepared:
        """The same with another plan."""
        check_arguments(plan, self.threads)
        # What was measured stays known.
        return replace(self, given=plan, rates=self.__dict__.get("hardware", self.rates))

    def resolve(self, work: Workload) -> Resolved:
        """The plan for ``work``, checked against the machine's memory; nothing is loaded.

        Raises
        ------
        Infeasible
            If it does not fit, or nothing does.
        """
        model, given, hw = self.model, self.given, self.capacities
        if isinstance(given, Plan):
            plan = given
        elif isinstance(given, Strategy):
            decode = given.with_(B=min(given.B, work.n))
            self._ledger(decode, work, "decode").require()
            plan = Plan(prefill=sound_prefill(model, hw, work, decode), decode=decode)
        else:
            fixed = {} if isinstance(given, str) else given
            # Rates only weigh the link against the CPU's attention.
            plan = sound_plan(model, hw if "omega" in fixed else self.hardware, work, fixed)
        B = min(plan.decode.B, work.n)
        plan = Plan(
            prefill=plan.prefill.with_(B=min(plan.prefill.B, B)), decode=plan.decode.with_(B=B)
        )
        decode = self._ledger(plan.decode, work, "decode").require()
        prefill = self._ledger(plan.prefill, work, "prefill", batch=B).require()
        return Resolved(plan, prefill=prefill, decode=decode)

    def load(self, progress: Callable[[int, int], None] | None = None) -> Engine:
        """Load the weights: an Engine.

        Parameters
        ----------
        progress : callable, optional
            Called with bytes loaded and bytes in all.

        Raises
        ------
        Infeasible
            If host memory cannot hold the weights; nothing has been read then.
        InvalidInput
            If the checkpoint is incomplete or damaged.
        """
        from moegen.exec.engine import Engine  # an Engine holds what was prepared

        if self.path is None:
            raise InvalidInput("there is no checkpoint to load: use Engine.random")
        self.require_weights()
        pin = self.device.type == "cuda"
        weights = HostWeights.load(self.path, self.model, self.family, pin=pin, progress=progress)
        return Engine(self, weights)

    def fill(self, seed: int = 0) -> Engine:
        """Make the weights up: an Engine for measuring speed.

        Raises
        ------
        Infeasible
            If host memory cannot hold the weights.
        """
        from moegen.exec.engine import Engine

        self.require_weights()
        pin = self.device.type == "cuda"
        weights = HostWeights.random(self.model, self.family, seed=seed, pin=pin)
        return Engine(self, weights)

    def require_weights(self) -> None:
        """Raise Infeasible if host memory cannot hold the weights and one short row."""
        least = Strategy(B=1, b_a=1, b_e=1, kv_slots=1, dense_slots=1)
        self._ledger(least, Workload.uniform(1, 1, 1), "decode").host.require()

    def _ledger(self, s: Strategy, work: Workload, phase: Any, batch: int | None = None) -> Ledger:
        ledger = memory(self.model, self.capacities, s, work, phase=phase, batch=batch)
        return ledger.beside("this process", self.process_bytes, "Python, torch and libraries")


def check_arguments(plan: Any, threads: Any) -> None:
    """Refuse what is wrong at once, before weights are loaded."""
    if not isinstance(plan, (Plan, Strategy, Mapping)) and plan != "auto":
        raise InvalidInput(
            f'plan must be a Plan, a Strategy, a mapping of its fields or "auto", got {plan!r}'
        )
    if isinstance(plan, Mapping):
        if not all(isinstance(name, str) for name in plan):
            raise InvalidInput(f"a plan's mapping has names of Strategy's fields, got {dict(plan)}")
        Strategy(B=1, b_a=1, b_e=1).with_(**plan)  # names and values are checked at once
    if threads is not None:
        whole(threads, "threads", at_least=1)


def _machine(gpu: int | None, host: int | None) -> tuple[HardwareSpec, dict[str, int]]:
    """This machine, and those of its memories that the caller limits."""
    hw = HardwareSpec.detect()
    limits = {"gpu_memory_bytes": gpu, "host_memory_bytes": host}
    return hw, {k: getattr(hw.with_(**{k: v}), k) for k, v in limits.items() if v is not None}


def _capacities(
    model: ModelSpec,
    device: torch.device,
    hw: HardwareSpec,
    limits: Mapping[str, int],
    held_bytes: int,
    growth_bytes: int,
) -> HardwareSpec:
    """This machine with its memories as this process may use them.

    Host memory is what is free beside what the process holds already. On CPU lanes the GPU's
    buffers lie there too, and get at most half of what the weights leave.
    """
    source = dict(hw.source) | dict.fromkeys(limits, "set by the caller")
    host = limits.get("host_memory_bytes")
    if host is None:
        free, source["host_memory_bytes"] = host_memory.free_bytes()
        host = free + held_bytes
    process_bytes = held_bytes + growth_bytes
    free = host - process_bytes
    if free <= 0:
        raise Infeasible(
            f"does not fit host memory: this process alone (Python, torch and libraries) takes "
            f"{format_bytes(process_bytes)} of {format_bytes(host)}, {format_bytes(-free)} too "
            f"much. Try more host memory",
            line="host",
            limit_bytes=host,
            need_bytes=process_bytes,
        )
    if device.type == "cpu":
        stand_in = max(1, (free - packed_bytes(model)) // 2)
        asked = limits.get("gpu_memory_bytes", stand_in)
        if asked >= stand_in:
            source["gpu_memory_bytes"] = "half of the host memory that the weights leave: CPU lanes"
        capacity = min(asked, stand_in)
        free = max(1, free - capacity)
    else:
        capacity = limits.get("gpu_memory_bytes")
        if capacity is None:
            capacity = free_gpu_memory(device)
            source["gpu_memory_bytes"] = "measured: free on the GPU now"
    # A GPU that nobody could ask for its name may be any.
    workspace = (
        (hw.gpu_workspace_bytes or LARGEST_WORKSPACE_BYTES) if device.type == "cuda" else None
    )
    return replace(
        hw,
        gpu_memory_bytes=capacity,
        host_memory_bytes=free,
        gpu_workspace_bytes=workspace,
        source=source,
    )
