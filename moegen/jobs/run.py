"""Answering the requests of a job, and what is said of it afterwards."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import moegen as mg
from moegen.errors import MachineError
from moegen.graph.hardware import HardwareSpec
from moegen.jobs.encoded import Job
from moegen.jobs.output import Output, Row
from moegen.units import format_bytes

if TYPE_CHECKING:
    from moegen.exec.engine import Completion, Engine
    from moegen.exec.generate import StepReport


@dataclass(frozen=True)
class Summary:
    """What a job did.

    Attributes
    ----------
    rows, served, errors : int
        Requests, those that were answered, and those that could not be.
    prompt_tokens, completion_tokens : int
        Of the answered ones.
    time_s : float
        Of generation, without loading the model.
    prefill_s, decode_s : float
        What of it each phase took; the rest is getting memory for the KV cache.
    gen_lens : tuple of int
        Tokens that each answered request got, in the order of the job's prompts.
    """

    rows: int
    served: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    time_s: float
    prefill_s: float = 0.0
    decode_s: float = 0.0
    gen_lens: tuple[int, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens over time, prefill included."""
        return self.completion_tokens / self.time_s if self.time_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; without the length of each answer."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gen_lens"}
        return named | {"tokens_per_s": self.tokens_per_s}


def engine_class() -> type[Engine]:
    """The Engine; MachineError that says what to install if it cannot be imported."""
    try:
        return mg.Engine
    except ModuleNotFoundError as error:
        raise MachineError(str(error)) from error


@contextmanager
def enough_memory(finished: Callable[[], str] = str) -> Iterator[None]:
    """Turn the memory errors of Python and CUDA into a MachineError; leave others as they are.

    ``finished`` says where to find what was done before; the message ends with it.
    """
    try:
        yield
    except MemoryError as error:
        has = format_bytes(HardwareSpec.detect().host_memory_bytes)
        raise MachineError(
            f"out of host memory ({str(error) or 'an allocation failed'}), of which there are "
            f"{has}. Free some, give a smaller --B, or plan with less by --host-memory."
            f"{finished()}"
        ) from error
    except _cuda_out_of_memory() as error:
        # What was asked for and what there is; the rest is about fragmentation.
        said = str(error).split(" Including ")[0].rstrip(".")
        raise MachineError(
            f"{said}. End what else uses the GPU, give a smaller --B or --b-a, or plan with less "
            f"by --gpu-memory.{finished()}"
        ) from error


def _cuda_out_of_memory() -> tuple[type[BaseException], ...]:
    # Looked up when something was raised: without torch it was not this.
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.OutOfMemoryError,)


def run_job(
    engine: Engine | None,
    job: Job,
    output: Output,
    *,
    on_row: Callable[[Row], None] | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> Summary:
    """Answer every request of ``job`` and write the answers to ``output``.

    Parameters
    ----------
    engine : Engine or None
        None will do if no request can be answered.
    on_row : callable, optional
        Called with every row that was written, answer or error.
    on_step : callable, optional
        Called after every step of the model.

    Raises
    ------
    Infeasible
        If the plan does not fit the machine.
    MachineError
        If the output cannot be written, or memory runs out.
    """
    prompt_tokens = 0
    gen_lens = [0] * len(job.served)
    spent = {"prefill_s": 0.0, "decode_s": 0.0}

    def add(row: Row) -> None:
        output.add(row)
        if on_row is not None:
            on_row(row)

    def on_finish(index: int, completion: Completion) -> None:
        nonlocal prompt_tokens
        add(
            {
                "id": job.served[index].id,
                "text": completion.text,
                "prompt_tokens": completion.prompt_tokens,
                "completion_tokens": completion.completion_tokens,
                "finish_reason": completion.finish_reason,
            }
        )
        prompt_tokens += completion.prompt_tokens
        gen_lens[index] = completion.completion_tokens

    def after_step(step: StepReport) -> None:
        spent.update(prefill_s=step.prefill_s, decode_s=step.decode_s)
        if on_step is not None:
            on_step(step)

    time_s = 0.0
    try:
        output.start()
        for row in job.refused:
            add(row)
        if job.served:
            assert engine is not None
            start_s = time.perf_counter()
            with enough_memory(lambda: output.kept):
                engine.generate(
                    job.prompts, max_new_tokens=job.limits, on_finish=on_finish, on_step=after_step
                )
            time_s = time.perf_counter() - start_s
        output.finish()
    except BaseException:
        output.abandon()
        raise
    return Summary(
        rows=len(job.served) + len(job.refused),
        served=len(job.served),
        errors=len(job.refused),
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(gen_lens),
        time_s=time_s,
        gen_lens=tuple(gen_lens),
        **spent,
    )
