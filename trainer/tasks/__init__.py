"""Tasks: the loss, the sums over evaluated samples, the metrics, and which metric is best.

A task does not depend on model, device or mode: it receives outputs and targets on any device.
Imports: errors, recipe.
"""

from trainer.tasks.classification import Classification, Multilabel
from trainer.tasks.metrics import register_metric
from trainer.tasks.regression import Regression
from trainer.tasks.task import (
    Task,
    create_task,
    find_task_class,
    is_registered,
    list_shipped,
    register_task,
)

SHIPPED = list_shipped()
__all__ = [
    "SHIPPED",
    "Classification",
    "Multilabel",
    "Regression",
    "Task",
    "create_task",
    "find_task_class",
    "is_registered",
    "register_metric",
    "register_task",
]
