"""Classes of optimizers, their arguments and state: of torch and timm, and the user's own.

`register_optimizer` and `register_schedule` add rows to the tables of `trainer.recipe`.
"""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.errors import RecipeError, SetupError, load_extra
from trainer.optim.muon import MuonAdamW
from trainer.recipe import OptimizerRecipe
from trainer.recipe.call_arguments import check_arguments, list_parameters
from trainer.recipe.known_names import TIMM
from trainer.recipe.optimizer_table import OPTIMIZERS, OptimizerTraits
from trainer.recipe.schedule_table import LR_SCHEDULES, OWN_KEYS, Formula, ScheduleTraits
from trainer.recipe.text import format_value

OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])
# Classes that the user has registered, by the value of optimizer.name.
OWN_CLASSES: dict[str, Any] = {}
# Classes by the `class_name` of a row of `OPTIMIZERS`: those of torch, and MuonAdamW.
CLASSES: dict[str, Any] = {**vars(torch.optim), "MuonAdamW": MuonAdamW}
# Arguments that a recipe cannot set with `optimizer.args`, and what to type or why.
OWNED = {
    "params": "it passes the model's parameters",
    "lr": "type optimizer.lr=",
    "weight_decay": "type optimizer.weight_decay=",
    "max_grad_norm": "type clip_grad_norm=",
    "corrected_weight_decay": "it needs the highest learning rate of every group; leave it out",
    **dict.fromkeys(
        ("fused", "foreach", "capturable", "differentiable", "matrices", "groups", "maximize"),
        "leave it out",
    ),
}


def register_optimizer(name: str) -> Callable[[OptimizerClass], OptimizerClass]:
    """Register a subclass of `torch.optim.Optimizer` as `optimizer.name=name`.

    Use it as a decorator. The class is called as `Class(groups, lr=...)`, with the values of
    `optimizer.args` as further arguments; the groups have `lr` and `weight_decay`. Its `step` has
    no closure. All of its state is in `self.state[p]`: tensors that start at zero, each 0-dim or of
    the shape of the parameter `p`.

    Raises:
        RecipeError: `name` is taken, or the class is not an optimizer with an argument `lr`.
    """
    keep = OPTIMIZERS.register(name)

    def decorate(own_class: OptimizerClass) -> OptimizerClass:
        is_optimizer = isinstance(own_class, type) and issubclass(own_class, torch.optim.Optimizer)
        if not is_optimizer or "lr" not in list_parameters(own_class):
            raise RecipeError(
                f"register_optimizer('{name}'): {own_class!r} must be a subclass of "
                "torch.optim.Optimizer whose constructor has an argument lr"
            )
        if name.startswith(TIMM):
            raise RecipeError(
                f"register_optimizer('{name}'): only timm's optimizers start with {TIMM}"
            )
        OWN_CLASSES[name] = own_class
        is_capturable = "capturable" in list_parameters(own_class)
        keep(OptimizerTraits(own_class.__name__, capturable=is_capturable))
        return own_class

    return decorate


def register_schedule(name: str) -> Callable[[Formula], Formula]:
    """Register a function as `schedule.name=name`; use it as a decorator.

    The function is called as `function(fraction, epochs, peak_lr, schedule)` and returns the
    learning rate of a step after the warm-up: `fraction` of the steps are done (0 to 1), `epochs`
    is the number of whole epochs since the warm-up, `peak_lr` the highest learning rate, and
    `schedule` the recipe's section, whose keys min_lr, step_epochs, gamma and power it may read.

    Raises:
        RecipeError: `name` is taken.
    """
    keep = LR_SCHEDULES.register(name)

    def decorate(formula: Formula) -> Formula:
        keep(ScheduleTraits(formula, keys=OWN_KEYS))
        return formula

    return decorate


def create_optimizer(
    recipe: OptimizerRecipe, groups: list[dict[str, Any]], **options: Any
) -> torch.optim.Optimizer:
    """Create the recipe's optimizer, which has no state yet.

    Args:
        recipe: the section `optimizer` of a recipe.
        groups: parameter groups.
        **options: further arguments of the class.

    Raises:
        RecipeError: `optimizer.args` or `optimizer.weight_decay` do not suit the class, or timm is
            not installed.
    """
    row = OPTIMIZERS[recipe.name]
    subject = f"optimizer.name={recipe.name}"
    if recipe.name in OWN_CLASSES:
        optimizer_class = OWN_CLASSES[recipe.name]
    elif recipe.name.startswith(TIMM):
        try:
            optimizer_class = getattr(load_extra(subject, "timm.optim"), row.class_name, None)
        except SetupError as error:
            raise RecipeError(str(error)) from None
        if optimizer_class is None:
            raise RecipeError(f"{subject} needs a newer timm: pip install --upgrade timm")
    else:
        optimizer_class = CLASSES[row.class_name]
    parameters = list_parameters(optimizer_class)
    has_decay = recipe.weight_decay or recipe.norm_weight_decay
    if has_decay and "weight_decay" not in parameters and recipe.name in OWN_CLASSES:
        raise RecipeError(
            f"{subject} has no argument weight_decay: type optimizer.weight_decay=0 "
            "optimizer.norm_weight_decay=null"
        )
    owned = OWNED | {key: f"type optimizer.{key}=" for key in row.keys}
    arguments = check_arguments("optimizer.args", recipe.args, parameters, owned, subject)
    values = {key: getattr(recipe, key) for key in row.keys}
    try:
        optimizer: torch.optim.Optimizer = optimizer_class(
            groups, lr=recipe.lr, **values, **row.options, **arguments, **options
        )
    except (TypeError, ValueError, RuntimeError) as error:
        # The program's own arguments are right, so the user's are not.
        if recipe.args or recipe.name in OWN_CLASSES:
            raise RecipeError(
                f"{subject} cannot be created with optimizer.args={format_value(recipe.args)}: "
                f"{error}"
            ) from None
        raise
    return optimizer


def fill_state(
    optimizer: torch.optim.Optimizer,
    row: OptimizerTraits,
    momentum: float,
    matrices: Collection[nn.Parameter] = (),
) -> None:
    """Add the tensors that the first step would create, unless the state has them.

    The first step of fused SGD would leave the momentum uninitialized if it were skipped because a
    gradient is not finite.

    Args:
        optimizer: its state is changed.
        row: properties of the optimizer.
        momentum: the value of optimizer.momentum.
        matrices: parameters with the state `matrix_state`.
    """
    for group in optimizer.param_groups:
        shared: dict[str, Tensor] = {}
        # A parameter that has been trained has the value of the group, which others get.
        for p in group["params"]:
            for name in row.group_state:
                if name in optimizer.state.get(p, {}):
                    shared.setdefault(name, optimizer.state[p][name])
        for p in group["params"]:
            shapes = row.list_state(p.shape, momentum)
            if p in matrices:
                shapes = dict.fromkeys(row.matrix_state, p.shape)
            tensors: dict[str, Any] = {
                name: _create_tensor(p, name, shape, row) for name, shape in shapes.items()
            }
            if tensors:
                tensors |= optimizer.state[p]
                for name in row.group_state:
                    tensors[name] = shared.setdefault(name, tensors[name])
                optimizer.state[p] = tensors
        group |= shared


def _create_tensor(p: nn.Parameter, name: str, shape: Any, row: OptimizerTraits) -> Tensor:
    value = 1.0 if name in row.ones else 0.0
    if name in row.scalars:
        # Other classes compute with scalars on the host, which would wait for the device.
        device = torch.device("cpu")
        if row.fused or row.capturable:
            device = p.device
        return torch.full((), value, dtype=torch.float32, device=device)
    if shape == p.shape:
        return torch.full_like(p.detach(), value)
    return torch.full(shape, value, dtype=p.dtype, device=p.device)
