"""The optimizers of the table, as parameters of tests: timm's are skipped without timm."""

from importlib.util import find_spec

import pytest

from trainer.recipe.optimizer_table import OPTIMIZERS

WITHOUT_TIMM = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
NAMES = [
    pytest.param(name, marks=[WITHOUT_TIMM] if name.startswith("timm:") else [])
    for name in OPTIMIZERS
]
