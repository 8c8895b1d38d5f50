"""The plugin of `counted_builds`, on simulated cards."""

from tests.simulated.simcuda import plugin  # noqa: F401
from tests.training import counted_builds  # noqa: F401
