"""Options that several commands share: dataclasses that a command takes whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import moegen as mg
from moegen.errors import InvalidInput, MachineError
from moegen.units import parse_bytes


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options: their fields become options of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters = []

    def add(name: str, annotation: Any, default: Any) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    for name, parameter in inspect.signature(command).parameters.items():
        group = hints[name]
        if is_dataclass(group):
            groups[name] = group
            annotations = get_type_hints(group, include_extras=True)
            for field in fields(group):
                add(field.name, annotations[field.name], field.default)
        else:
            add(name, group, parameter.default)

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


class Fetch(StrEnum):
    all = "all"
    routed = "routed"


def _known_schedule(name: str) -> str:
    from moegen.graph.build import SCHEDULES

    if name not in SCHEDULES:
        raise InvalidInput(f"--schedule: {name!r} is not there yet; known: {', '.join(SCHEDULES)}")
    return name


def _strategy(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Strategy", **more)


@dataclass(frozen=True)
class StrategyFlags:
    """The strategy flags; None where one was not given."""

    B: Annotated[int | None, _strategy("--B", "Accumulated batch, in rows.", min=1)] = None
    b_a: Annotated[int | None, _strategy("--b-a", "Attention micro-batch, in rows.", min=1)] = None
    b_e: Annotated[int | None, _strategy("--b-e", "Expert micro-batch, in tokens.", min=1)] = None
    s_expert: Annotated[
        str | None, _strategy("--s-expert", "GPU memory for prefetched experts, such as 8GiB.")
    ] = None
    s_params: Annotated[str | None, _strategy("--s-params", "Weights that stay on the GPU.")] = None
    omega: Annotated[
        float | None, _strategy("--omega", "CPU's share of decode attention.", min=0, max=1)
    ] = None
    kv_slots: Annotated[int | None, _strategy("--kv-slots", "GPU slots for KV.", min=1)] = None
    dense_slots: Annotated[
        int | None, _strategy("--dense-slots", "GPU slots for dense weights.", min=1)
    ] = None
    expert_group: Annotated[int | None, _strategy("--expert-group", "Experts a task.", min=1)] = (
        None
    )
    fetch: Annotated[Fetch | None, _strategy("--fetch", "Which experts are copied.")] = None
    schedule: Annotated[
        str,
        _strategy("--schedule", "How tasks are laid out: module.", callback=_known_schedule),
    ] = "module"

    def strategy(self, rows: int) -> mg.Strategy | None:
        """The Strategy that the flags make, or None if there are none.

        B is ``rows`` unless given, b_a is B and b_e 8192.
        """
        values = asdict(self) | {
            "s_expert": size("--s-expert", self.s_expert),
            "s_params": size("--s-params", self.s_params),
            "fetch": None if self.fetch is None else self.fetch.value,
        }
        del values["schedule"]  # of the graph, not of the Strategy
        given = {name: value for name, value in values.items() if value is not None}
        if not given:
            return None
        B = given.get("B", rows)
        return mg.Strategy(**{"B": B, "b_a": B, "b_e": 8192, **given})

    def required(self) -> mg.Strategy:
        """The Strategy of a command that cannot choose one itself."""
        strategy = None if self.B is None else self.strategy(rows=self.B)
        if strategy is None:
            raise InvalidInput("--B is missing: how many rows are decoded together?")
        return strategy


def _work(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Workload", **more)


@dataclass(frozen=True)
class WorkloadFlags:
    """What is to be answered: rows of one length, a preset, or a file of requests."""

    n: Annotated[int | None, _work("--n", "Rows; 8500 unless given.", min=1)] = None
    prompt_len: Annotated[
        int | None, _work("--prompt-len", "Tokens of a prompt; 512 unless given.", min=1)
    ] = None
    gen_len: Annotated[
        int | None, _work("--gen-len", "Tokens of an answer; 256 unless given.", min=1)
    ] = None
    workload: Annotated[
        str | None,
        _work(
            "--workload",
            "Instead: mmlu, gsm8k, chatbot-arena, or a file of requests, counted with the "
            "tokenizer in the folder MODEL.",
        ),
    ] = None

    def read(self, model: str) -> mg.Workload:
        """The Workload; files are counted with the tokenizer of ``model``, a folder."""
        from moegen.graph.workload import presets

        if self.workload is None:
            return mg.Workload.uniform(
                n=self.n or 8500, prompt_len=self.prompt_len or 512, gen_len=self.gen_len or 256
            )
        preset, path = self.workload in presets(), Path(self.workload)
        for flag, value in (
            ("--n", self.n),
            ("--prompt-len", self.prompt_len),
            # A request may leave it open how long its answer is.
            ("--gen-len", self.gen_len if preset else None),
        ):
            if value is not None:
                raise InvalidInput(f"--workload {self.workload} says that already: drop {flag}")
        if preset:
            return mg.Workload.preset(self.workload)
        if not path.is_file():
            raise InvalidInput(
                f"--workload: {self.workload!r} is no file, and none of the presets "
                f"{', '.join(presets())}"
            )
        return mg.Workload.from_jsonl(
            path, count_tokens=_counter(model), gen_len=self.gen_len or 256
        )


def _counter(model: str) -> Callable[[Any], int]:
    """Counts the tokens of a prompt or of messages as ``moegen run`` would send them."""
    from moegen.graph.requests import Request
    from moegen.jobs import Unservable, encode

    needed = "--workload FILE is counted in tokens: MODEL must be a folder with a tokenizer"
    if not Path(model).is_dir():
        raise InvalidInput(f"{needed}, and {model} is no folder")
    try:
        from moegen.exec.loading import load_tokenizer
    except ModuleNotFoundError as error:
        raise MachineError(
            f"--workload FILE needs {error.name}, which is not installed: pip install 'moegen[run]'"
        ) from error
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise InvalidInput(f"{needed}, and {model} has none")

    def count(content: Any) -> int:
        if isinstance(content, str):
            request = Request(0, prompt=content)
        else:
            request = Request(0, messages=tuple(content))
        try:
            return len(encode(tokenizer, request))
        except Unservable as error:
            raise InvalidInput(str(error)) from error

    return count


def size(flag: str, text: str | None) -> int | None:
    """Bytes of a flag such as ``8GiB``; errors name the flag."""
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except InvalidInput as error:
        raise InvalidInput(f"{flag}: {error}") from error
