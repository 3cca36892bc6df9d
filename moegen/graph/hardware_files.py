"""YAML files of hardware: fields with a value, and with a source where one is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moegen.errors import InvalidInput


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises
    ------
    InvalidInput
        If the file cannot be read, or holds anything else.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise InvalidInput(f"{path} cannot be read: {e.strerror or e}") from e
    except (UnicodeDecodeError, yaml.YAMLError) as e:
        raise InvalidInput(f"{path} cannot be read as YAML: {e}") from e
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} must hold keys and values, got {type(data).__name__}")
    if str(kind := data.get("format", "")).startswith("moegen."):
        raise InvalidInput(
            f"{path} is no machine, it is a file of {kind}: a profile goes to --profile, or to "
            f"CostModel.from_profile"
        )
    return data


def with_sources(
    fields: dict[str, Any], otherwise: str | dict[str, str], where: str | Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and sources of fields written as ``value`` or ``{value: ..., source: ...}``.

    Parameters
    ----------
    otherwise : str or dict
        The source of a field that names none, the same for all or by field.

    Raises
    ------
    InvalidInput
        If an entry has other keys than those two.
    """
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for key, entry in fields.items():
        said = otherwise if isinstance(otherwise, str) else otherwise.get(key, "no source")
        if isinstance(entry, dict):
            if "value" not in entry or entry.keys() - {"value", "source"}:
                raise InvalidInput(f"{where}: {key} must have the keys value and source")
            values[key], source[key] = entry["value"], str(entry.get("source", said))
        else:
            values[key], source[key] = entry, said
    return values, source
