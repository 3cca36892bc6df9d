"""Model families that can run: a registry of import paths, so that one loads when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from moegen.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from moegen.exec.families.base import Family
    from moegen.graph.model import ModelSpec

FAMILIES = {
    "mixtral": "moegen.exec.families.mixtral:Mixtral",
    "deepseek_v2": "moegen.exec.families.deepseek_v2:DeepseekV2",
}


def require_family(spec: ModelSpec) -> None:
    """Refuse a model of a family that cannot run: InvalidInput. Needs no torch."""
    if spec.model_type not in FAMILIES:
        raise InvalidInput(
            f"{spec.name}: models of family {spec.model_type!r} can be planned but not run yet; "
            f"families that run are {', '.join(FAMILIES)}"
        )


def family_for(
    spec: ModelSpec, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Family:
    """The mathematics of ``spec``'s family, in ``dtype`` (the checkpoint's unless given).

    Raises
    ------
    InvalidInput
        If the family cannot run, or the configuration asks for something it does not do.
    """
    require_family(spec)
    import torch

    module, name = FAMILIES[spec.model_type].split(":")
    return getattr(import_module(module), name)(spec, dtype or getattr(torch, spec.dtype), device)
