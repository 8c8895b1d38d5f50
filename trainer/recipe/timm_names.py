"""What models of timm there are, read from its source: importing it takes seconds."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from trainer.errors import RecipeError
from trainer.recipe.text import nearest

TIMM = "timm:"  # before their names


def check_timm_name(name: str) -> None:
    """Refuse a name, as in timm:resnet18, that timm does not have.

    Raises:
        RecipeError: that, or timm is not installed.
    """
    if find_spec("timm") is None:
        raise RecipeError(f"model.name={name} needs the package timm: pip install timm")
    known, wanted = timm_models(), name.removeprefix(TIMM).partition(".")[0]
    if known and wanted not in known:
        guess = nearest(wanted, known)
        hint = f"did you mean model.name={TIMM}{guess}?" if guess else "timm.list_models() lists its models"
        raise RecipeError(f"model.name={name} is not a model of timm; {hint}")


def timm_models() -> list[str]:
    """Their names, without the prefix; none where timm is not installed."""
    spec = find_spec("timm")
    names: list[str] = []
    for place in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(place, "models").glob("*.py")):
            names += re.findall(r"^@register_model\n(?:@.*\n)*def (\w+)", file.read_text(encoding="utf-8"), re.M)
    return names
