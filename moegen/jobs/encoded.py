"""Requests as a model sees them: token ids, and error rows for those it cannot answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moegen.errors import InvalidInput
from moegen.graph.requests import Request
from moegen.graph.workload import Workload
from moegen.jobs.output import Row

if TYPE_CHECKING:
    from moegen.graph.model import ModelSpec


@dataclass(frozen=True)
class Job:
    """A file of requests, encoded.

    Attributes
    ----------
    served : list of Request
        Those that the model can answer; ``prompts`` and ``limits`` are theirs, one each.
    prompts : list of list of int
        Token ids.
    limits : list of int
        The most tokens that each answer may have.
    refused : list of dict
        Error rows of the others.
    """

    served: list[Request]
    prompts: list[list[int]]
    limits: list[int]
    refused: list[Row]

    @classmethod
    def encode(
        cls,
        requests: Sequence[Request],
        tokenizer: Any,
        model: ModelSpec,
        max_tokens: int = 256,
    ) -> Job:
        """Encode requests with the checkpoint's tokenizer.

        Parameters
        ----------
        max_tokens : int
            For requests that name no ``max_tokens`` of their own.

        Raises
        ------
        InvalidInput
            If there is no tokenizer.
        """
        if tokenizer is None:
            raise InvalidInput("the checkpoint has no tokenizer, so it cannot answer text")
        job = cls([], [], [], [])
        for request in requests:
            limit = request.max_tokens or max_tokens
            try:
                ids = encode(tokenizer, request)
                _require_room(len(ids), limit, model.max_context)
                _require_known(ids, model.vocab)
            except Unservable as error:
                job.refused.append({"id": request.id, "error": str(error)})
                continue
            job.served.append(request)
            job.prompts.append(ids)
            job.limits.append(limit)
        return job

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) for ids in self.prompts]

    @property
    def work(self) -> Workload:
        """The lengths as a Workload; InvalidInput if no request can be answered."""
        return Workload.from_lengths(self.prompt_lens, self.limits)


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
    try:
        return list(
            tokenizer.apply_chat_template(
                list(request.messages), add_generation_prompt=True, return_dict=False
            )
        )
    except Exception as error:  # a template is a program of the checkpoint's: it may fail anyhow
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unservable(f"the chat template refuses these messages: {reason}") from error


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
