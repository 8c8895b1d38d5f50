"""Work over any list of devices: ordered, streaming, losing nothing. `DevicePool` is the whole of it.

It knows nothing of images and models.
Imports: errors, devices, processes.
"""

from trainer.pool.device_pool import DevicePool
from trainer.pool.failures import ItemError
from trainer.pool.worker import current_device

__all__ = ["DevicePool", "ItemError", "current_device"]
