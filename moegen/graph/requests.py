"""Files of requests: what a job is to answer, and where a workload's lengths may come from.

One request a line::

    {"id": "a", "prompt": "The capital of France is"}
    {"id": "b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}

``id`` is a string or a whole number, used once. ``max_tokens`` is optional, other keys are
ignored, and so are blank lines. A malformed file is refused whole, before anything is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput


@dataclass(frozen=True)
class Request:
    """One line of a file of requests; exactly one of ``prompt`` and ``messages`` is set."""

    id: str | int
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    max_tokens: int | None = None


def read_requests(path: str | Path) -> list[Request]:
    """The requests of a JSON-lines file.

    Raises
    ------
    InvalidInput
        If the file cannot be read, holds no request, or any line is malformed. The message names
        the file and the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InvalidInput(f"{path}:{line}: not UTF-8 text ({error.reason})") from error
    requests: list[Request] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _parse(line)
            first = line_of.setdefault(str(request.id), number)
            if first != number:
                raise InvalidInput(f"id {request.id!r} was used on line {first} already")
        except InvalidInput as error:
            raise InvalidInput(f"{path}:{number}: {error}") from error
        requests.append(request)
    if not requests:
        raise InvalidInput(f"{path} holds no request: write one JSON object a line")
    return requests


def _parse(line: str) -> Request:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # "\\ud800" is JSON, but no text
        raise InvalidInput(f"half of a surrogate pair is no text ({error.reason})") from error
    except RecursionError as error:
        raise InvalidInput("not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise InvalidInput(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidInput(f"a request is a JSON object, not {_kind(row)}")
    if "id" not in row:
        raise InvalidInput('the key "id" is missing')
    if isinstance(row["id"], bool) or not isinstance(row["id"], (str, int)):
        raise InvalidInput(f'"id" must be a string or a whole number, not {_kind(row["id"])}')
    if ("prompt" in row) == ("messages" in row):
        found = "both are there" if "prompt" in row else "both are missing"
        raise InvalidInput(f'a request has either "prompt" or "messages", but {found}')
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise InvalidInput(f'"prompt" must be a string, not {_kind(row["prompt"])}')
    messages = row.get("messages")
    if "messages" in row:
        _check_messages(messages)
    limit = row.get("max_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidInput(f'"max_tokens" must be a whole number of at least 1, got {limit!r}')
    return Request(
        row["id"], row.get("prompt"), None if messages is None else tuple(messages), limit
    )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise InvalidInput(f'"messages" must be a list, not {_kind(messages)}')
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidInput(f"message {i} must be a JSON object, not {_kind(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidInput(f'message {i} needs a string "{key}"')


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")
