"""Where a model's configuration lies: the catalogue, a checkpoint, a file, the Hub."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from moegen.errors import InvalidInput

CATALOGUE = Path(__file__).parent.parent / "data" / "models"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def catalogue() -> list[str]:
    """Names of the models that ship with moegen."""
    return sorted(p.stem for p in CATALOGUE.glob("*.json"))


def load_config(name_or_path: str | Path) -> tuple[str, dict[str, Any], str]:
    """Find a configuration: its model's name, its content, and what to call it in errors.

    Raises
    ------
    InvalidInput
        If nothing is found, or the file is no JSON object.
    """
    text = str(name_or_path)
    if text.lower() in catalogue():
        path = CATALOGUE / f"{text.lower()}.json"
        return path.stem, _read_json(path), str(path)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInput(f"{path} has no config.json: it is no checkpoint directory")
        path = path / "config.json"
    if path.is_file():
        config = _read_json(path)
        generation = path.parent / "generation_config.json"
        if path.name == "config.json" and generation.is_file():
            # Chat models often list more end tokens here than in config.json.
            eos = eos_ids(config) + eos_ids(_read_json(generation))
            if eos:
                config["eos_token_id"] = list(dict.fromkeys(eos))
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return name, config, str(path)
    if HUB_ID.fullmatch(text) and not text.startswith("."):
        return text, _from_hub(text), text
    raise InvalidInput(
        f"{text!r} is no model: no such directory or file, and the catalogue has "
        f"{', '.join(catalogue())}"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InvalidInput(f"{path} cannot be read as JSON: {e}") from e
    except RecursionError as e:
        raise InvalidInput(f"{path} cannot be read as JSON: it is nested too deeply") from e
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data


def _from_hub(name: str) -> dict[str, Any]:
    try:
        # By name: this package must import without transformers installed.
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise InvalidInput(
            f"{name!r} is no local path; fetching it from the Hub needs transformers: "
            f"pip install 'moegen[run]', or give a directory with config.json"
        ) from None
    try:
        config, _ = transformers.PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as e:
        said = str(e).strip().partition("\n")[0]  # the rest is advice for users of transformers
        raise InvalidInput(
            f"{name!r} is no folder or file here, and the Hub did not give it: {said}"
        ) from e
    if not config:
        raise InvalidInput(f"{name!r} has no config.json on the Hub")
    return json.loads(json.dumps(config, default=str))


def eos_ids(hf: dict[str, Any]) -> tuple[int, ...]:
    """The end tokens that a configuration lists."""
    eos = hf.get("eos_token_id")
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int for i in ids):
        raise InvalidInput(f"eos_token_id must be a whole number or a list of them, got {eos!r}")
    return tuple(ids)
