"""Files of requests: JSON lines in, JSON lines out.

Input: see :mod:`moegen.graph.requests`.

Output, one line a request, in the order of the input::

    {"id": "a", "text": " Paris.", "prompt_tokens": 5, "completion_tokens": 3,
     "finish_reason": "stop"}
    {"id": "b", "error": "..."}

A request that is well formed but cannot be served (an empty prompt, or one that does not fit the
context) becomes an error line, and the others run. ``finish_reason`` is ``"stop"`` at the end of
the text and ``"length"`` at ``max_tokens``.

While a job runs, its lines are in ``OUTPUT.partial``, in the order in which they finished, below a
first line that identifies the job. When all are there they are put in order and renamed to
``OUTPUT``: a file of that name is always complete. A job that was cut short leaves its ``.partial``
to be read if it holds an answer, else none; started again it begins anew. An ``OUTPUT``, or a
``.partial`` of another job, that exists already is never overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from moegen.errors import InvalidInput, MachineError
from moegen.graph.hardware import HardwareSpec
from moegen.graph.requests import Request
from moegen.graph.workload import Workload
from moegen.units import format_bytes

if TYPE_CHECKING:
    from moegen.exec.engine import Completion, Engine
    from moegen.exec.generate import StepReport
    from moegen.graph.memory import Ledger
    from moegen.graph.strategy import Plan

Row = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """What a job did. ``time_s`` spans generation, without loading the model."""

    rows: int
    served: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    time_s: float

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens over time, prefill included."""
        return self.completion_tokens / self.time_s if self.time_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


class Unservable(Exception):
    """A well-formed request that the model cannot answer; its message becomes the error line."""


def encode(tokenizer: Any, request: Request) -> list[int]:
    """The token ids of a request's prompt.

    A chat template writes the tokens that begin a text itself, so none are added to it.

    Raises
    ------
    Unservable
        If there is nothing to say, or the messages do not fit the chat template.
    """
    if request.messages is None:
        ids = list(tokenizer(request.prompt).input_ids)
        if not request.prompt or not ids:
            raise Unservable("the prompt is empty")
        return ids
    if not request.messages:
        raise Unservable("the list of messages is empty")
    if not tokenizer.chat_template:
        raise Unservable('the model has no chat template: send a "prompt" instead of "messages"')
    from jinja2.exceptions import TemplateError

    try:
        return list(
            tokenizer.apply_chat_template(
                list(request.messages), add_generation_prompt=True, return_dict=False
            )
        )
    except TemplateError as error:
        raise Unservable(f"the chat template refuses these messages: {error}") from error


class Output:
    """The file that a job writes: ``path.partial`` while it runs, ``path`` when it is complete.

    Parameters
    ----------
    path : path
    requests : sequence of Request
    **settings
        What else decides the answers (the model, the number format). A ``.partial`` whose
        requests or settings differ is another job's.

    Raises
    ------
    InvalidInput
        If ``path``, or another job's ``.partial``, exists, or there is no folder to write in.
    """

    def __init__(self, path: str | Path, requests: Sequence[Request], **settings: Any) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        what = json.dumps([[asdict(r) for r in requests], settings], sort_keys=True)
        self._header = {"job": hashlib.sha256(what.encode()).hexdigest()}
        self._order = [request.id for request in requests]
        self._rows: dict[str | int, Row] = {}
        self._file: IO[str] | None = None
        self._done = False
        if self.path.exists():
            raise InvalidInput(
                f"{self.path} exists already: choose another --output, or remove it first"
            )
        require_writable(self.path)
        if self.partial.exists() and not self._is_ours():
            raise InvalidInput(
                f"{self.partial} belongs to another job, with other requests or settings: "
                "choose another --output, or remove it first"
            )

    def _is_ours(self) -> bool:
        try:
            with self.partial.open(encoding="utf-8") as file:
                return json.loads(file.readline()) == self._header
        except (OSError, ValueError):
            return False

    @property
    def kept(self) -> str:
        """Where the answers of a job that fails now are to be found: a sentence, or nothing."""
        if self._done:
            return f" All answers are in {self.path}."
        answered = any("error" not in row for row in self._rows.values())
        return f" Rows finished so far are in {self.partial}." if answered else ""

    @property
    def _earlier(self) -> Path:
        return self.partial.with_name(self.partial.name + ".old")

    def start(self) -> None:
        """Begin the partial file; an earlier try's is kept until this one has answers."""
        with self._writing():
            if self.partial.exists():
                os.replace(self.partial, self._earlier)
            self._file = self.partial.open("w", encoding="utf-8")
        self._write(self._header)

    def add(self, row: Row) -> None:
        """Write one finished row through to the file."""
        if row["id"] not in self._rows:
            self._write(row)
            self._rows[row["id"]] = row

    def finish(self) -> None:
        """Put the rows in the order of the requests, under the final name."""
        assert self._file is not None
        ordered = self.path.with_name(self.path.name + ".ordered")
        with self._writing():
            self._file.close()
            try:
                with ordered.open("w", encoding="utf-8") as file:
                    file.writelines(_line(self._rows[id]) for id in self._order)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(ordered, self.path)
            except BaseException:
                ordered.unlink(missing_ok=True)
                raise
            self._done = True
            self.partial.unlink()
            self._earlier.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Close the partial file after a failure; remove it if no request was answered."""
        if self._file is None:
            return
        with suppress(OSError):  # what went wrong before is the news
            self._file.close()
        with suppress(OSError):
            if self.kept:
                self._earlier.unlink(missing_ok=True)
            elif self._earlier.exists():
                os.replace(self._earlier, self.partial)
            else:
                self.partial.unlink(missing_ok=True)

    def _write(self, row: Row) -> None:
        assert self._file is not None
        with self._writing():
            self._file.write(_line(row))
            self._file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"cannot write {self.path}: {error.strerror or error}.{self.kept}"
            ) from error


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def require_writable(path: Path) -> None:
    """Refuse a path that no file can be written to, before any work is done for it.

    Raises
    ------
    InvalidInput
        If it is a folder, or its folder is missing or closed.
    """
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path.parent} is no folder: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidInput(f"{path} may not be written: choose another place")


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
    engine: Engine,
    requests: Sequence[Request],
    output: Output,
    *,
    max_tokens: int = 256,
    on_plan: Callable[[Plan, Ledger], None] | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> Summary:
    """Answer every request and write the answers to ``output``.

    Parameters
    ----------
    max_tokens : int
        For requests that name no ``max_tokens`` of their own.
    on_plan : callable, optional
        Called before anything runs with the plan and the memory that decode needs by it; not
        called if no request can be served.
    on_row : callable, optional
        Called with every row that was written, answer or error.
    on_step : callable, optional
        Called after every step of the model.

    Raises
    ------
    InvalidInput
        If the checkpoint has no tokenizer.
    Infeasible
        If the plan does not fit the machine.
    MachineError
        If the output cannot be written, or memory runs out.
    """
    if engine.tokenizer is None:
        raise InvalidInput("the checkpoint has no tokenizer, so it cannot answer text")
    n_errors = prompt_tokens = completion_tokens = 0

    def add(row: Row) -> None:
        nonlocal n_errors, prompt_tokens, completion_tokens
        output.add(row)
        n_errors += "error" in row
        prompt_tokens += row.get("prompt_tokens", 0)
        completion_tokens += row.get("completion_tokens", 0)
        if on_row is not None:
            on_row(row)

    served: list[Request] = []
    refused: list[Row] = []
    prompts: list[str | list[int]] = []
    lengths: list[int] = []
    limits: list[int] = []
    for request in requests:
        limit = request.max_tokens or max_tokens
        try:
            ids = encode(engine.tokenizer, request)
            _require_room(len(ids), limit, engine.model.max_context)
            _require_known(ids, engine.model.vocab)
        except Unservable as error:
            refused.append({"id": request.id, "error": str(error)})
            continue
        served.append(request)
        prompts.append(ids)
        lengths.append(len(ids))
        limits.append(limit)

    def on_finish(index: int, completion: Completion) -> None:
        add(
            {
                "id": served[index].id,
                "text": completion.text,
                "prompt_tokens": completion.prompt_tokens,
                "completion_tokens": completion.completion_tokens,
                "finish_reason": completion.finish_reason,
            }
        )

    if served:  # a plan that does not fit is refused before there is a file
        plan = engine.resolve(Workload.from_lengths(lengths, limits))
        if on_plan is not None and engine.ledger is not None:
            on_plan(plan, engine.ledger)
    time_s = 0.0
    try:
        output.start()
        for row in refused:
            add(row)
        if served:
            start_s = time.perf_counter()
            with enough_memory(lambda: output.kept):
                engine.generate(
                    prompts, max_new_tokens=limits, on_finish=on_finish, on_step=on_step
                )
            time_s = time.perf_counter() - start_s
        output.finish()
    except BaseException:
        output.abandon()
        raise
    return Summary(len(requests), len(served), n_errors, prompt_tokens, completion_tokens, time_s)


def _require_known(ids: Sequence[int], vocab: int) -> None:
    unknown = [i for i in ids if i >= vocab]
    if unknown:
        raise Unservable(
            f"the tokenizer gives token {unknown[0]}, and the model knows {vocab}: it was made "
            f"for another model"
        )


def _require_room(prompt_tokens: int, limit: int, context: int) -> None:
    if prompt_tokens + limit > context:
        raise Unservable(
            f"{prompt_tokens} prompt tokens and up to {limit} new ones are "
            f"{prompt_tokens + limit - context} more than the model's context of {context}"
        )
