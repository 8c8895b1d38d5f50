"""`DevicePool`: compute streams of items on any list of devices, in order and without losing items.

The package knows neither images nor models.
Imports: errors, devices, processes.
"""

from trainer.pool.device_pool import DevicePool
from trainer.pool.failures import ItemError
from trainer.pool.worker import current_device

__all__ = ["DevicePool", "ItemError", "current_device"]
