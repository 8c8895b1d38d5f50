"""Figures for people."""

from __future__ import annotations

import re

from trainer.commands.compare.comparison_table import spread
from trainer.telemetry.readable import number


def test_numbers_for_people():
    assert [number(value) for value in (1234.5, 99.94, 12.345, 1.5)] == ["1,234", "99.9", "12.3", "1.5"]
    assert not re.search(r"\d", spread(151.0, 173.0)), "a mean below its deviation is no figure"
    assert spread(1709.2, 28.44) == "1,709 +- 28" and spread(1.53, 0.046) == "1.53 +- 0.05"
