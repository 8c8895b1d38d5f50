"""Check by a few steps that an optimizer can be resumed, and find what its steps depend on.

The rows of `OPTIMIZERS` say this for the shipped optimizers, which a test verifies by the same
steps. The user's own classes, and classes with `optimizer.args`, are verified when a run begins.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainer.errors import RecipeError, describe
from trainer.optim.classes import OWN_CLASSES, create_optimizer, fill_state
from trainer.recipe import OptimizerRecipe
from trainer.recipe.optimizer_table import OPTIMIZERS, OptimizerTraits
from trainer.recipe.text import format_value

# Shapes of the parameters of the trials: a bias, a linear layer and a convolution.
SHAPES = ((4,), (6, 5), (4, 3, 2, 2))
STEPS = 3
RULES = (
    "a checkpoint keeps the tensors in self.state[p], which must start at zero and be 0-dim or of "
    "the parameter's shape"
)


def find_traits(recipe: OptimizerRecipe) -> OptimizerTraits:
    """Return the properties of the recipe's optimizer.

    Raises:
        RecipeError: it is the user's own, or has arguments in `optimizer.args`, and a resumed run
            would differ.
    """
    if recipe.args or recipe.name in OWN_CLASSES:
        return _verify_once(recipe.model_dump_json())
    return OPTIMIZERS[recipe.name]


@functools.cache
def _verify_once(text: str) -> OptimizerTraits:
    """Verify the optimizer of a recipe's section in JSON, once per process."""
    recipe = OptimizerRecipe.model_validate_json(text)
    # `plan` builds optimizers of fake tensors, which have no values to compare.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        try:
            return verify(recipe)
        except RecipeError:
            raise
        # The user's class may raise any error.
        except Exception as error:
            raise RecipeError(
                f"optimizer.name={recipe.name} cannot take a step ({describe(error)})"
            ) from None


def verify(recipe: OptimizerRecipe) -> OptimizerTraits:
    """Return the row of the recipe's optimizer, with the properties that its steps show.

    Raises:
        RecipeError: steps after a resume would differ, or the optimizer ignores its learning rate.
    """
    # The results of other learning rates might differ too little.
    recipe = recipe.model_copy(update={"lr": 0.1})
    whole = _Trial(recipe)
    addresses = [p.data_ptr() for p in whole.parameters]
    whole.take_steps(range(STEPS))
    if addresses != [p.data_ptr() for p in whole.parameters]:
        raise _refuse(
            recipe, "its step replaces p.data, which other processes may share: use p.add_"
        )
    row = _find_state(recipe, whole)
    stopped = _Trial(recipe, row=row)
    stopped.take_steps(range(STEPS - 1))
    resumed = _Trial(recipe, row=row)
    resumed.copy_from(stopped)
    resumed.take_steps([STEPS - 1])
    ends = whole.tensors()
    if not all(tensor.isfinite().all() for tensor in ends.values()):
        raise _refuse(recipe, f"its first {STEPS} steps are not finite")
    # The class keeps the tensors of `group_state` in its groups only, and `fill_state` in both.
    if not all(torch.equal(tensor, resumed.tensors()[name]) for name, tensor in ends.items()):
        raise _refuse(recipe, f"a resumed run would take other steps: {RULES}")
    slower = _Trial(recipe.model_copy(update={"lr": 0.05}))
    slower.take_steps(range(STEPS))
    if all(map(torch.equal, slower.parameters, whole.parameters)):
        raise _refuse(recipe, "its steps do not depend on group['lr'], which a schedule changes")
    alone = []
    for number in range(len(SHAPES)):
        trial = _Trial(recipe, select=itemgetter(slice(number, number + 1)))
        trial.take_steps(range(STEPS))
        alone += trial.parameters
    halves = _Trial(recipe, select=_halve)
    halves.take_steps(range(STEPS))
    pairs = zip(halves.parameters[::2], halves.parameters[1::2], strict=True)
    joined = [*map(torch.cat, pairs)]
    return replace(
        row,
        joint=row.joint or not _are_close(alone, whole.parameters),
        whole=row.whole or not _are_close(joined, whole.parameters),
    )


class _Trial:
    """An optimizer, and parameters and gradients that are the same in all trials."""

    def __init__(
        self,
        recipe: OptimizerRecipe,
        row: OptimizerTraits | None = None,
        select: Callable[[list[Tensor]], Sequence[Tensor]] = list,
    ) -> None:
        """Create the parameters.

        Args:
            recipe: the section `optimizer` of a recipe.
            row: properties by which the state is filled; None to let the first step create it.
            select: function that chooses or cuts the parameters and their gradients.
        """
        self.select = select
        self.parameters = [nn.Parameter(tensor.clone()) for tensor in select(_draw(seed=STEPS))]
        groups = [{"params": self.parameters, "weight_decay": recipe.weight_decay, "rate": 1.0}]
        self.optimizer = create_optimizer(recipe, groups)
        if row is not None:
            fill_state(self.optimizer, row, recipe.momentum)

    def take_steps(self, numbers: Iterable[int]) -> None:
        """Take the steps with these numbers, which determine the gradients."""
        for number in numbers:
            for p, gradient in zip(self.parameters, self.select(_draw(number)), strict=True):
                p.grad = gradient.clone()
            self.optimizer.step()

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Return parameters and states by the number of the parameter and the name of the state."""
        tensors: dict[tuple[int, str], Tensor] = {}
        for number, p in enumerate(self.parameters):
            tensors[number, ""] = p
            for name, value in self.optimizer.state[p].items():
                tensors[number, name] = value
        return tensors

    @torch.no_grad()
    def copy_from(self, other: "_Trial") -> None:
        """Copy all tensors of another trial, as a resumed run copies them from a checkpoint."""
        sources = other.tensors()
        for key, tensor in self.tensors().items():
            tensor.copy_(sources[key])


def _find_state(recipe: OptimizerRecipe, trial: _Trial) -> OptimizerTraits:
    """Return the optimizer's row, with the tensors that the steps of a trial have created."""
    row = OPTIMIZERS[recipe.name]
    added = {}
    for p in trial.parameters:
        known = row.list_state(p.shape, recipe.momentum)
        for name, value in trial.optimizer.state[p].items():
            if not isinstance(value, Tensor) or value.shape not in (p.shape, ()):
                if name in known:
                    continue
                what = f"{type(value).__name__} {value}"
                if isinstance(value, Tensor):
                    what = f"a tensor {tuple(value.shape)} for a parameter {tuple(p.shape)}"
                raise _refuse(recipe, f"its state '{name}' is {what}: {RULES}")
            if name not in known:
                added[name] = value.dim() == 0
    scalars = [name for name, is_scalar in added.items() if is_scalar]
    # The last name of the row's own state stays last, because `factored_state` replaces it.
    return replace(row, state=(*added, *row.state), scalars=(*row.scalars, *scalars))


def _draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cpu") for shape in SHAPES]


def _halve(tensors: list[Tensor]) -> list[Tensor]:
    """Cut each tensor into the upper and the lower half of its rows, as `fsdp` does."""
    halves: list[Tensor] = []
    for tensor in tensors:
        halves += tensor.chunk(2)
    return halves


def _are_close(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    for tensor, other in zip(tensors, others, strict=True):
        if not torch.allclose(tensor, other, rtol=1e-4, atol=1e-5):
            return False
    return True


def _refuse(recipe: OptimizerRecipe, reason: str) -> RecipeError:
    arguments = ""
    if recipe.args:
        arguments = f" with optimizer.args={format_value(recipe.args)}"
    return RecipeError(f"optimizer.name={recipe.name}{arguments}: {reason}")
