"""What a model is trained for: a loss, sums over evaluated samples, the metrics made of them, and which one is best.

No model, no devices, no mode: a task sees outputs and targets, wherever they are.
Imports: errors, recipe.
"""

from trainer.tasks.classification import Classification, Multilabel
from trainer.tasks.regression import Regression
from trainer.tasks.task import Task, create, kind, known, register_task

SHIPPED: tuple[type[Task], ...] = (Classification, Multilabel, Regression)
__all__ = ["SHIPPED", "Classification", "Multilabel", "Regression", "Task", "create", "kind", "known", "register_task"]
