"""Groups of options that several commands share: dataclasses that a command takes whole."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import moegen as mg
from moegen import jobs
from moegen.cli.flags import size
from moegen.errors import InvalidInput, MachineError
from moegen.graph.requests import read_requests


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


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if math.isnan(share):
        raise typer.BadParameter(f"{text!r} is no number: give a share from 0 to 1")
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"{text} is not in the range 0<=x<=1")
    return share


def with_flags(advice: str) -> str:
    """The advice of a ledger, with the names of flags for those of the Strategy's fields."""
    head, try_, tail = advice.rpartition(". Try ")
    names = "|".join(_STRATEGY_FLAGS)
    return head + try_ + re.sub(rf"\b({names})\b", lambda m: _STRATEGY_FLAGS[m[0]], tail)


def _strategy(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Strategy", **more)


@dataclass(frozen=True)
class StrategyFlags:
    """The strategy flags; None where one was not given."""

    B: Annotated[
        int | None,
        _strategy(
            "--B",
            "Rows (requests) in flight together. All of them share each copy of the weights to "
            "the GPU: the more, the more tokens a second. Each takes host memory for its KV.",
            min=1,
            metavar="N",
        ),
    ] = None
    b_a: Annotated[
        int | None,
        _strategy(
            "--b-a",
            "Rows that the GPU attends to at a time. More make fewer and larger kernels, and "
            "cost GPU memory: a KV slot holds so many rows, one layer of them.",
            min=1,
            metavar="N",
        ),
    ] = None
    b_e: Annotated[
        int | None,
        _strategy(
            "--b-e",
            "Tokens that go through an expert at a time. More use the GPU better, up to some "
            "thousands, and cost GPU memory for what lies between its matrices.",
            min=1,
            metavar="N",
        ),
    ] = None
    s_expert: Annotated[
        str | None,
        _strategy(
            "--s-expert",
            "GPU memory for experts copied ahead of their use, such as 8GiB. More lets copies go "
            "on while the GPU computes; more than a layer's experts seldom helps.",
            metavar="SIZE",
        ),
    ] = None
    s_params: Annotated[
        str | None,
        _strategy(
            "--s-params",
            "GPU memory for weights that stay there, such as 10GiB: they are never copied again, "
            "which saves time on the link in every step.",
            metavar="SIZE",
        ),
    ] = None
    omega: Annotated[
        float | None,
        _strategy(
            "--omega",
            "Share of the decode attention that the CPU does, 0 to 1. That KV need not be copied "
            "to the GPU, but takes time on the CPU: best where the CPU and the link take equally "
            "long.",
            parser=_share,
            metavar="SHARE",
        ),
    ] = None
    kv_slots: Annotated[
        int | None,
        _strategy(
            "--kv-slots",
            "Places on the GPU for the KV of --b-a rows each. 2 let one be copied while another "
            "is in use; each further one costs as much GPU memory again.",
            min=1,
            metavar="N",
        ),
    ] = None
    dense_slots: Annotated[
        int | None,
        _strategy(
            "--dense-slots",
            "Places on the GPU for a layer's weights other than its experts. 2 let the next "
            "layer's be copied while one is in use; 1 saves that memory and waits.",
            min=1,
            metavar="N",
        ),
    ] = None
    expert_group: Annotated[
        int | None,
        _strategy(
            "--expert-group",
            "Experts copied and computed as one task. More save overhead where experts are many "
            "and small; a slot for experts is then so many times larger.",
            min=1,
            metavar="N",
        ),
    ] = None
    fetch: Annotated[
        Fetch | None,
        _strategy(
            "--fetch",
            "all: copy every expert ahead of its use. routed: wait for the router, then copy "
            "only the experts that got tokens, which pays with few rows. Expert k of an "
            "expert task is then the k-th of those that got tokens, not expert k of the model.",
        ),
    ] = None
    schedule: Annotated[
        str,
        _strategy(
            "--schedule",
            "The order of tasks: module, in which each part of a layer takes the whole batch "
            "before the next part begins.",
            callback=_known_schedule,
            metavar="NAME",
        ),
    ] = "module"

    def within(self, rows: int) -> tuple[StrategyFlags, list[str]]:
        """The flags with no more rows in flight than there are, and a note if that changed them."""
        if self.B is None or self.B <= rows:
            return self, []
        note = f"--B {self.B} is more than there are rows: taken as {rows}"
        return replace(self, B=rows), [note]

    def given(self) -> dict[str, Any]:
        """The fields of a Strategy that flags were given for."""
        values = asdict(self) | {
            "s_expert": size("--s-expert", self.s_expert),
            "s_params": size("--s-params", self.s_params),
            "fetch": None if self.fetch is None else self.fetch.value,
        }
        return {k: v for k, v in values.items() if k in _STRATEGY_FLAGS and v is not None}

    def strategy(self) -> mg.Strategy:
        """The Strategy of a command that chooses none itself: b_a is B, b_e 8192 unless given."""
        if self.B is None:
            raise InvalidInput("--B is missing: how many rows are decoded together?")
        return mg.Strategy(**{"b_a": self.B, "b_e": 8192, **self.given()})


# The flag of each field of a Strategy.
_STRATEGY_FLAGS = {
    field.name: f"--{field.name.replace('_', '-')}"
    for field in fields(StrategyFlags)
    if field.name != "schedule"  # of the graph
}


def _work(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Workload", **more)


@dataclass(frozen=True)
class WorkloadFlags:
    """What is to be answered: rows of one length, a preset, or a file of requests."""

    n: Annotated[int | None, _work("--n", "Rows; 8500 unless given.", min=1, metavar="N")] = None
    prompt_len: Annotated[
        int | None,
        _work("--prompt-len", "Tokens of a prompt; 512 unless given.", min=1, metavar="N"),
    ] = None
    gen_len: Annotated[
        int | None, _work("--gen-len", "Tokens of an answer; 256 unless given.", min=1, metavar="N")
    ] = None
    workload: Annotated[
        str | None,
        _work(
            "--workload",
            "Instead: mmlu, gsm8k, chatbot-arena, or a file of requests, counted with the "
            "tokenizer in the folder MODEL.",
            metavar="NAME|FILE",
        ),
    ] = None

    def read(self, model: str, spec: mg.ModelSpec) -> tuple[mg.Workload, list[str]]:
        """The Workload, and notes on it; files are counted with the tokenizer of ``model``."""
        from moegen.graph.workload import presets

        if self.workload is None:
            work = mg.Workload.uniform(
                n=self.n or 8500, prompt_len=self.prompt_len or 512, gen_len=self.gen_len or 256
            )
            return work, []
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
            return mg.Workload.preset(self.workload), []
        if not path.is_file():
            raise InvalidInput(
                f"--workload: {self.workload!r} is no file, and none of the presets "
                f"{', '.join(presets())}"
            )
        tokenizer, requests = _tokenizer(model), read_requests(path)
        job = jobs.Job.encode(requests, tokenizer, spec, self.gen_len or 256)
        if not job.refused:
            return replace(job.work, name=path.name), []
        first = f"id {job.refused[0]['id']!r}: {job.refused[0]['error']}"
        if not job.served:
            raise InvalidInput(f"{path}: no row can be served, the first, {first}")
        note = (
            f"{len(job.refused)} of {len(requests)} rows cannot be served and are left out, the "
            f"first, {first}"
        )
        return replace(job.work, name=path.name), [note]


def _tokenizer(model: str) -> Any:
    """The tokenizer with which ``moegen run`` would count; errors speak of ``--workload``."""
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
    return tokenizer
