"""Roles of parameters: the factors of their learning rates, and which of them Muon trains.

The roles are determined from the whole model, because a pipeline stage has only some of its layers.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from trainer.errors import RecipeError
from trainer.models.blocks import (
    CONVOLUTIONS,
    find_head,
    list_blocks,
    list_frozen,
    list_frozen_norms,
)
from trainer.optim.verification import find_traits
from trainer.recipe import Recipe
from trainer.recipe.checks import check_optimizer, check_rows
from trainer.recipe.optimizer_table import MATRIX_OPTIMIZERS


class Roles(NamedTuple):
    """Roles of the parameters of a whole model. They are equal on all ranks.

    Attributes:
        rates: factors of the learning rate by name of the parameter in the user's model. The factor
            of a parameter without an entry is 1.
        matrices: names of the parameters that Muon trains, or would train if they were not frozen.
            Empty if the optimizer is not Muon.
    """

    rates: Mapping[str, float] = {}
    matrices: frozenset[str] = frozenset()


def find_roles(model: nn.Module, recipe: Recipe) -> Roles:
    """Determine the roles of a whole model's parameters.

    Raises:
        RecipeError: the mode does not support the optimizer, or the optimizer trains weight
            matrices and the model has none that train.
    """
    check_rows(recipe)
    check_optimizer(recipe, find_traits(recipe.optimizer))
    decay = recipe.optimizer.layer_decay
    rates: dict[str, float] = {}
    if decay is not None:
        # Layer-wise decay of the learning rate, as in the fine-tuning of ELECTRA (Clark et al.,
        # arXiv:2003.10555) and BEiT (Bao et al., arXiv:2106.08254).
        row = list_blocks(model)
        for n, block in enumerate(row):
            factor = float(decay ** (len(row) - 1 - n))
            rates |= dict.fromkeys(block.parameters, factor)
    matrices = frozenset[str]()
    if recipe.optimizer.name in MATRIX_OPTIMIZERS:
        matrices = list_hidden_matrices(model, recipe)
    return Roles(rates, matrices)


def list_hidden_matrices(model: nn.Module, recipe: Recipe) -> frozenset[str]:
    """Return the names of the weights that suit `torch.optim.Muon`.

    Muon trains parameters with two dimensions, such as the weights of linear layers, and the
    weights of convolutions. AdamW trains all other parameters, and those that do not suit Muon:
    embeddings and tables of biases are looked up rather than multiplied, the first convolution
    reads the image, the last layer computes the outputs, and grouped convolutions are not one
    matrix.

    Raises:
        RecipeError: the model has no weight that Muon trains, or all of them are frozen.
    """
    convolutions = {}
    excluded = {f"{find_head(model)}.weight"}
    for name, layer in model.named_modules():
        if isinstance(layer, CONVOLUTIONS):
            convolutions[f"{name}.weight"] = layer
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            excluded.add(f"{name}.weight")
    excluded.update([*convolutions][:1])
    matrices = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2
        if name in convolutions:
            is_matrix = is_matrix or convolutions[name].groups == 1
        # Swin's tables of relative position biases have two dimensions as well. Their names contain
        # "bias", and AdamW trains them.
        is_bias = "bias" in name.rpartition(".")[2]
        if is_matrix and not is_bias and name not in excluded:
            matrices[name] = parameter
    if not any(parameter.requires_grad for parameter in matrices.values()):
        raise RecipeError(
            f"optimizer.name={recipe.optimizer.name} trains hidden layers, and "
            f"{recipe.model.name} has none that train: AdamW trains the first "
            "convolution and the last layer. Use optimizer.name=sgd or adamw, freeze fewer layers "
            "with model.freeze, or use a deeper model"
        )
    return frozenset(matrices)


def describe_training(
    model: nn.Module,
    recipe: Recipe,
) -> dict[str, str]:
    """Describe frozen parameters and learning rates in lines of the banner, by title."""
    lines = {}
    optimizer = recipe.optimizer
    parameters = dict(model.named_parameters())
    frozen_names = list_frozen(model)
    norms = list_frozen_norms(model)
    if frozen_names:
        total = 0
        size = 0
        for p in parameters.values():
            total += p.numel()
            if not p.requires_grad:
                size += p.numel()
        text = f"{', '.join(frozen_names)}: {size:,} of {total:,} parameters"
        if norms:
            text += f"; statistics of {len(norms)} normalisation layer"
            if len(norms) > 1:
                text += "s"
        lines["frozen"] = text
    rate = f"{recipe.peak_lr:g}"
    if optimizer.lr_per is not None:
        rate += (
            f": {optimizer.lr:g} for {optimizer.lr_per} images a step, and "
            f"batch_size={recipe.batch_size}"
        )
    if optimizer.layer_decay is not None:
        count = len(list_blocks(model))
        low = recipe.peak_lr * optimizer.layer_decay ** (count - 1)
        rate += (
            f"; that in the last of {count} blocks, times {optimizer.layer_decay:g} in each "
            f"before it: {low:.3g}"
        )
    if optimizer.lr_per is not None or optimizer.layer_decay is not None:
        lines["lr"] = rate
    if optimizer.name in MATRIX_OPTIMIZERS:
        names = list_hidden_matrices(model, recipe)
        matrices = [parameters[name] for name in names if parameters[name].requires_grad]
        size = sum(p.numel() for p in matrices)
        adamw_lr = "the same lr"
        if optimizer.adamw_lr is not None:
            adamw_lr = f"lr {recipe.peak_lr * optimizer.adamw_lr / optimizer.lr:g}"
        lines[optimizer.name] = (
            f"{len(matrices)} hidden layers, {size:,} parameters; AdamW has the others, at "
            f"{adamw_lr}"
        )
    return lines
