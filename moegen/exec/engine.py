"""Engine: a checkpoint on a device, that answers prompts and runs graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from moegen.errors import InvalidInput
from moegen.exec.decode_attention import cpu_decode, usual_threads
from moegen.exec.delays import Checked, Delays
from moegen.exec.generate import FinishReason, Generation, SequenceState, StepReport
from moegen.exec.kv import KVStore
from moegen.exec.lanes import peak_gpu_memory
from moegen.exec.prepare import Given, Prepared
from moegen.exec.program import Machinery
from moegen.exec.prompts import to_sequences
from moegen.exec.synthetic import run_synthetic
from moegen.exec.weights import HostWeights, Progress
from moegen.graph import host_memory
from moegen.graph.checks import whole
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import Ledger
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Plan
from moegen.graph.task import TaskGraph
from moegen.graph.workload import Workload

if TYPE_CHECKING:
    from moegen.timeline import Timeline


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
    prepared : Prepared
        What was known before the weights were loaded.
    model : ModelSpec
        With the dtype that it runs in.
    device : torch.device
    tokenizer
        The checkpoint's, or None.
    weights : HostWeights
    plan : Plan or None
        That of the last run, or the one given.
    prefill_ledger, ledger : Ledger or None
        Memory of the last run's prefill, and of its decode phase.
    timelines : list of Timeline
        Measured, of the last call: one for each layout of the batch, last steps only.
    notes : list of str
        What a person should know and no error says: why memory is not pinned, for example.
    """

    def __init__(self, prepared: Prepared, weights: HostWeights) -> None:
        self.prepared, self.weights = prepared, weights
        self.model, self.device = prepared.model, prepared.device
        self.tokenizer = prepared.tokenizer
        self.plan: Plan | None = prepared.given if isinstance(prepared.given, Plan) else None
        self.ledger: Ledger | None = None
        self.prefill_ledger: Ledger | None = None
        self.timelines: list[Timeline] = []
        self._closed = False
        self.notes = [*prepared.notes, *weights.notes]
        threads, on_gpu = prepared.threads, prepared.device.type == "cuda"
        if threads is None:
            threads = usual_threads(prepared.device)
        decode = cpu_decode(threads)
        if decode.note is not None:
            self.notes.append(decode.note)
        head = weights.head.to(prepared.device) if on_gpu else weights.head
        self.machinery = Machinery(
            family=weights.family,
            weights=weights,
            device=prepared.device,
            head=weights.head_layout.view(head),
            decode=decode,
        )

    @property
    def hardware(self) -> HardwareSpec:
        """The machine: memory that this process may use, and rates, measured on first need."""
        return self.prepared.hardware

    @classmethod
    def prepare(
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
        """Look at a checkpoint folder and at the machine; load nothing yet.

        ``prepare(...).resolve(work)`` says whether a workload fits, and by which plan;
        ``.load()`` makes the Engine.

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
            What to plan with: host memory that this process may hold, itself included, and
            memory of the GPU. What is free on the machine unless given.
        hardware : HardwareSpec, optional
            Its rates are planned with. Unless given they are measured, which takes some
            seconds on the first use on a machine.
        threads : int, optional
            Of the CPU's attention.

        Raises
        ------
        InvalidInput, Infeasible, MachineError
        """
        return Prepared.checkpoint(
            path,
            plan,
            device=device,
            dtype=dtype,
            gpu_memory_bytes=gpu_memory_bytes,
            host_memory_bytes=host_memory_bytes,
            hardware=hardware,
            threads=threads,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        plan: Given = "auto",
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Engine:
        """Load a checkpoint folder: `prepare` and then load.

        Parameters
        ----------
        path, plan, **options
            As for `prepare`.
        progress : callable, optional
            Called with bytes loaded and bytes in all.

        Raises
        ------
        InvalidInput, Infeasible, MachineError
        """
        return cls.prepare(path, plan, **options).load(progress)

    @classmethod
    def random(
        cls, model: ModelSpec, plan: Given = "auto", *, seed: int = 0, **options: Any
    ) -> Engine:
        """An engine of ``model``'s widths with random weights: for measuring speed.

        Parameters
        ----------
        seed : int
            Of the weights.
        plan, **options
            As for `prepare`; ``dtype`` is bfloat16 unless given.

        Raises
        ------
        InvalidInput, Infeasible, MachineError
        """
        seed = whole(seed, "seed", at_most=2**63 - 1)
        return Prepared.of_model(model, plan, **options).fill(seed)

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
            context; if a limit is no whole number of at least 1, or a delay is no time; if the
            engine is closed.
        Infeasible
            If the plan does not fit the machine.
        """
        self._require_open()
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
            frozenset() if ignore_eos else frozenset(self.model.eos_token_ids),
            work=work,
            on_finish=finish,
            on_step=on_step,
            keep_logits=return_logits,
            delays=None if delays is None else Checked(delays),
        )
        batches = [rows[i : i + plan.decode.B] for i in range(0, len(rows), plan.decode.B)]
        most = max(sum(s.room for s in batch) for batch in batches)
        family = self.machinery.family
        store = KVStore(self.model, most, family.dtype, pin=self.device.type == "cuda")
        if store.note is not None and store.note not in self.notes:
            self.notes.append(store.note)
        try:
            for batch in batches:
                generation.run(batch, store)
        finally:
            store.close()
        self.timelines = generation.timelines
        return [done[s.index] for s in rows]

    def execute(self, g: TaskGraph, steps: int = 1, *, delays: Delays | None = None) -> Timeline:
        """Run ``g`` on synthetic rows of its shape, KV filled, and measure it.

        Every step has the graph's shape, so the Timeline compares with a simulated one. Where
        ``delays`` holds tasks back on their lanes, ``meta["delayed_s"]`` says for how long.

        Raises
        ------
        InvalidInput
            If the graph is not one step of this engine's model with a shape, ``steps`` is no whole
            number of at least 1, a delay is no time, or the engine is closed.
        """
        self._require_open()
        held = None if delays is None else Checked(delays)
        return run_synthetic(g, self.machinery, steps, held)

    def close(self) -> None:
        """Stop threads, and give pinned memory and the GPU's back; it runs nothing any more."""
        self._closed = True
        self.machinery.close()
        self.weights.close()

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidInput(
                "the engine is closed, and has no weights any more: make another one, or run all "
                "of it before it is closed"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self.model.name} on {self.device}: {self.weights!r}>"

    @property
    def cpu_attention(self) -> str:
        """What does the CPU's decode attention: "C++ AVX-512, 15 threads", for example."""
        decode = self.machinery.decode
        return f"{decode.kind}, {decode.threads} thread{'s' if decode.threads > 1 else ''}"

    def resolve(self, work: Workload) -> Plan:
        """The plan that `generate` will follow for ``work``, checked against the machine.

        Sets ``plan``, ``prefill_ledger`` and ``ledger``.

        Raises
        ------
        Infeasible
            If it does not fit, or nothing does.
        """
        resolved = self.prepared.resolve(work)
        self.plan, self.ledger = resolved.plan, resolved.decode
        self.prefill_ledger = resolved.prefill
        return resolved.plan

    def memory_peak(self) -> dict[str, int | None]:
        """The most bytes held so far: ``host`` by this process, ``gpu`` by its allocator.

        On CPU lanes ``gpu`` is None: its buffers lie in host memory.
        """
        on_gpu = self.device.type == "cuda"
        gpu = peak_gpu_memory(self.device) if on_gpu else None
        return {"host": host_memory.peak_bytes(), "gpu": gpu}

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
