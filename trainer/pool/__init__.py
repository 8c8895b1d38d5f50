"""`DevicePool`: work on any list of devices, in order, streaming, without losing items.

It does not know images or models.
Imports: errors, devices, processes.
"""

from trainer.pool.device_pool import DevicePool
from trainer.pool.failures import ItemError
from trainer.pool.worker import current_device

__all__ = ["DevicePool", "ItemError", "current_device"]
