"""Engine: a checkpoint on a device, that answers prompts and runs graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from moegen.errors import InvalidInput
from moegen.exec.families import family_for
from moegen.exec.generate import FinishReason, Generation, SequenceState, StepReport
from moegen.exec.kv import KVStore
from moegen.exec.lanes import attention_pool
from moegen.exec.loading import (
    DTYPES,
    checked_device,
    hardware_of,
    load_tokenizer,
    torch_dtype,
)
from moegen.exec.program import Machinery
from moegen.exec.prompts import to_sequences
from moegen.exec.runner import Delays
from moegen.exec.synthetic import run_synthetic
from moegen.exec.transfer import transfer_for
from moegen.exec.weights import HostWeights, Progress
from moegen.graph.checks import whole
from moegen.graph.detect import cores
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import Ledger, memory
from moegen.graph.model import ModelSpec
from moegen.graph.sound import sound_plan, sound_prefill
from moegen.graph.strategy import Plan, Strategy
from moegen.graph.task import TaskGraph
from moegen.graph.workload import Workload

if TYPE_CHECKING:
    from moegen.timeline import Timeline


def _check_arguments(plan: Any, threads: Any) -> None:
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


@dataclass(frozen=True)
class Completion:
    """What the model said to one prompt.

    Attributes
    ----------
    index : int
        The prompt's place in the call.
    text : str
        Decoded without special tokens; empty for an engine without a tokenizer.
    token_ids : list of int
        As sampled, an end-of-sequence token included.
    prompt_tokens, completion_tokens : int
    finish_reason : {"stop", "length"}
    logits : Tensor, [completion_tokens, V], optional
        Only if they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason
    logits: torch.Tensor | None = None


class Engine:
    """A model's weights in host memory and a device to compute on.

    Use `from_pretrained` for a checkpoint, or `random` for weights without meaning.

    Attributes
    ----------
    model : ModelSpec
        With the dtype that it runs in.
    tokenizer
        The checkpoint's, or None.
    plan : Plan or None
        That of the last run, or the one given.
    ledger : Ledger or None
        Memory of the last run's decode phase.
    timelines : list of Timeline
        Measured, of the last call: one for each layout of the batch, last steps only.
    """

    def __init__(
        self,
        model: ModelSpec,
        weights: HostWeights,
        *,
        device: torch.device,
        hardware: HardwareSpec,
        plan: Plan | Strategy | Mapping[str, Any] | str = "auto",
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        threads: int | None = None,
    ) -> None:
        self.model, self.weights, self.device, self.hardware = model, weights, device, hardware
        self.tokenizer, self.eos = tokenizer, frozenset(eos_token_ids)
        _check_arguments(plan, threads)
        self._given = {} if isinstance(plan, str) else plan
        self.plan: Plan | None = plan if isinstance(plan, Plan) else None
        self.ledger: Ledger | None = None
        self.timelines: list[Timeline] = []
        if threads is None:
            # On CUDA one core is left to the threads that issue work; on CPU lanes torch's
            # own threads do the work.
            threads = max(1, cores() - 1) if device.type == "cuda" else 1
        family = weights.family
        head = weights.head if device.type == "cpu" else weights.head.to(device)
        self.machinery = Machinery(
            family=family,
            weights=weights,
            device=device,
            transfer=transfer_for(device),
            head=weights.head_layout.view(head),
            pool=attention_pool(threads),
            threads=threads,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        plan: Plan | Strategy | Mapping[str, Any] | str = "auto",
        *,
        device: str | None = None,
        dtype: str | None = None,
        gpu_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        progress: Progress | None = None,
        threads: int | None = None,
    ) -> Self:
        """Load a checkpoint folder.

        Parameters
        ----------
        path : str or Path
            A folder with config.json, safetensors and tokenizer.
        plan : Plan, Strategy, mapping or "auto"
            A Strategy is decode's; prefill's is then chosen to go with it. A mapping holds
            the fields of decode's Strategy that are to stay as given, the others are chosen;
            "auto" chooses all. What is not given is resolved once the prompts are known.
        device : {"cpu", "cuda"}, optional
            CUDA if there is one.
        dtype : {"float32", "bfloat16", "float16"}, optional
            The checkpoint's own unless given.
        gpu_memory_bytes, host_memory_bytes : int, optional
            Limits to plan with; what the machine has unless given.
        progress : callable, optional
            Called with bytes loaded and bytes in all.

        Raises
        ------
        InvalidInput, Infeasible, MachineError
        """
        _check_arguments(plan, threads)
        where = checked_device(device)
        spec = ModelSpec.from_pretrained(path)
        if dtype is not None:
            spec = spec.with_(dtype=dtype)
        family = family_for(spec, torch_dtype(spec, dtype), where)
        hardware = hardware_of(where, gpu_memory_bytes, host_memory_bytes)
        tokenizer = load_tokenizer(path)
        weights = HostWeights.load(path, spec, family, pin=where.type == "cuda", progress=progress)
        return cls(
            spec,
            weights,
            device=where,
            hardware=hardware,
            plan=plan,
            tokenizer=tokenizer,
            eos_token_ids=spec.eos_token_ids,
            threads=threads,
        )

    @classmethod
    def random(
        cls,
        model: ModelSpec,
        plan: Plan | Strategy | Mapping[str, Any] | str = "auto",
        *,
        device: str | None = None,
        dtype: str = "bfloat16",
        gpu_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> Self:
        """An engine of ``model``'s widths with random weights: for measuring speed."""
        _check_arguments(plan, threads)
        where = checked_device(device)
        seed = whole(seed, "seed", at_most=2**63 - 1)
        model = model.with_(dtype=dtype)
        family = family_for(model, DTYPES[dtype], where)
        weights = HostWeights.random(model, family, seed=seed, pin=where.type == "cuda")
        hardware = hardware_of(where, gpu_memory_bytes, host_memory_bytes)
        return cls(model, weights, device=where, hardware=hardware, plan=plan, threads=threads)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int | Sequence[int] = 64,
        *,
        on_finish: Callable[[int, Completion], None] | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        forced: Sequence[Sequence[int]] | None = None,
        return_logits: bool = False,
        ignore_eos: bool = False,
        delays: Delays | None = None,
    ) -> list[Completion]:
        """Answer ``prompts`` greedily, all rows together as far as memory allows.

        Parameters
        ----------
        prompts : sequence of str or of token ids
            A string is tokenized as it is; chat templates are the caller's.
        max_new_tokens : int or sequence of int
            At most so many tokens, for all rows or row by row.
        on_finish : callable, optional
            Called with the row's index and its Completion as soon as it has ended.
        on_step : callable, optional
            Called after every step.
        forced : sequence of token ids, optional
            Feed these tokens instead of the sampled ones (teacher forcing); with
            ``return_logits`` this scores a given text.
        return_logits : bool
            Keep the logits that each token was taken from.
        ignore_eos : bool
            Go on to ``max_new_tokens`` whatever is sampled.

        Raises
        ------
        InvalidInput
            If a prompt is empty, is neither text nor token ids, or is longer than the model's
            context; if a limit is no whole number of at least 1.
        Infeasible
            If the plan does not fit the machine.
        """
        rows = to_sequences(self.model, self.tokenizer, prompts, max_new_tokens, forced)
        done: dict[int, Completion] = {}
        if not rows:
            return []
        work = Workload.from_lengths([len(s.prompt) for s in rows], [s.max_new for s in rows])
        plan = self.resolve(work)

        def finish(s: SequenceState) -> None:
            done[s.index] = self._completion(s, return_logits)
            if on_finish is not None:
                on_finish(s.index, done[s.index])

        generation = Generation(
            self.machinery,
            plan,
            frozenset() if ignore_eos else self.eos,
            on_finish=finish,
            on_step=on_step,
            keep_logits=return_logits,
            delays=delays,
        )
        batches = [rows[i : i + plan.decode.B] for i in range(0, len(rows), plan.decode.B)]
        most = max(sum(s.room for s in batch) for batch in batches)
        family = self.machinery.family
        store = KVStore(self.model, most, family.dtype, pin=self.device.type == "cuda")
        try:
            for batch in batches:
                generation.run(batch, store)
        finally:
            store.close()
        self.timelines = generation.timelines
        return [done[s.index] for s in rows]

    def execute(self, g: TaskGraph, steps: int = 1, *, delays: Delays | None = None) -> Timeline:
        """Run ``g`` on synthetic rows of its shape, KV filled, and measure it.

        Every step has the graph's shape, so the Timeline compares with a simulated one.
        """
        return run_synthetic(g, self.machinery, steps, delays)

    def close(self) -> None:
        """Stop threads and give pinned memory back."""
        self.machinery.pool.shutdown()
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self.model.name} on {self.device}: {self.weights!r}>"

    def resolve(self, work: Workload) -> Plan:
        """The plan that `generate` will follow for ``work``, checked against the machine.

        Sets ``plan`` and ``ledger``.

        Raises
        ------
        Infeasible
            If it does not fit, or nothing does.
        """
        model, hw, given = self.model, self.hardware, self._given
        if isinstance(given, Plan):
            plan = given
        elif isinstance(given, Strategy):
            decode = given.with_(B=min(given.B, work.n))
            self.ledger = memory(model, hw, decode, work).require()
            plan = Plan(prefill=sound_prefill(model, hw, work, decode), decode=decode)
        else:
            plan = sound_plan(model, hw, work, given)
        B = min(plan.decode.B, work.n)
        plan = Plan(
            prefill=plan.prefill.with_(B=min(plan.prefill.B, B)), decode=plan.decode.with_(B=B)
        )
        self.ledger = memory(model, hw, plan.decode, work).require()
        memory(model, hw, plan.prefill, work, phase="prefill").require()
        self.plan = plan
        return plan

    def _completion(self, s: SequenceState, logits: bool) -> Completion:
        assert s.finish is not None
        text = self.tokenizer.decode(s.out, skip_special_tokens=True) if self.tokenizer else ""
        return Completion(
            index=s.index,
            text=text,
            token_ids=list(s.out),
            prompt_tokens=len(s.prompt),
            completion_tokens=len(s.out),
            finish_reason=s.finish,
            logits=torch.stack(s.logits) if logits else None,
        )
