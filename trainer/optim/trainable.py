"""Which of a model's parameters train, and how: what the optimizer of a stage cannot see of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import RecipeError
from trainer.models.blocks import CONVOLUTIONS, blocks, frozen, frozen_norms, head
from trainer.recipe import Recipe


class Roles(NamedTuple):
    """What parameters are in the whole model, by their plain names; a rank may hold a part of them."""

    rates: Mapping[str, float] = {}  # factors of the learning rate; 1 where it is not here
    matrices: frozenset[str] = frozenset()  # those that Muon trains, convolutions among them


def roles_of(model: nn.Module, recipe: Recipe) -> Roles:
    """The roles of a whole model's parameters. Raises RecipeError where the optimizer has nothing to do in it."""
    decay, rates = recipe.optimizer.layer_decay, {}
    if decay is not None:
        row = blocks(model)
        # As for fine-tuning ELECTRA (Clark et al., arXiv:2003.10555) and BEiT (Bao et al., arXiv:2106.08254).
        rates = {name: float(decay ** (len(row) - 1 - n)) for n, block in enumerate(row) for name in block.parameters}
    return Roles(rates, hidden_matrices(model, recipe) if recipe.optimizer.name == "muon" else frozenset())


def hidden_matrices(model: nn.Module, recipe: Recipe) -> frozenset[str]:
    """Names of the weights of linear layers but the last, and of convolutions but the first and those in groups.

    torch.optim.Muon is for these. Embeddings and tables of biases are looked up rather than multiplied, the first
    convolution mostly sees the image, and the last layer makes the outputs: AdamW is for them, as for all
    one-dimensional parameters.

    Raises:
        RecipeError: there are none that train.
    """
    layers = {f"{name}.weight": layer for name, layer in model.named_modules()}
    convolutions = {name: layer.groups for name, layer in layers.items() if isinstance(layer, CONVOLUTIONS)}
    whole = {name for name, groups in convolutions.items() if groups == 1}
    outside = {name for name, layer in layers.items() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}
    outside |= {*list(convolutions)[:1], f"{head(model)}.weight"}
    hidden = {name: p for name, p in model.named_parameters() if p.ndim == 2 or name in whole}
    trained = {name for name, p in hidden.items() if p.requires_grad and "bias" not in name.rpartition(".")[2]}
    if not trained - outside:
        raise RecipeError(
            f"optimizer.name=muon trains hidden layers, and {recipe.model.name} has none that train: the first "
            "convolution and the last layer are AdamW's. Use optimizer.name=sgd or adamw, freeze fewer layers by "
            "model.freeze, or take a model of more"
        )
    return frozenset(trained - outside)


def normalises_batches(model: nn.Module) -> bool:
    """Whether some batch normalisation looks at the batch in training; a frozen one keeps the statistics it has."""
    still = frozen_norms(model)
    return any(isinstance(layer, _BatchNorm) and layer not in still for layer in model.modules())


def notes(model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Lines of the banner, by their title: what does not train, and how the rest does where it is not all alike."""
    lines, optimizer = {}, recipe.optimizer
    still, named, norms = frozen(model), dict(model.named_parameters()), frozen_norms(model)
    if still:
        size = sum(p.numel() for p in named.values() if not p.requires_grad)
        lines["frozen"] = f"{', '.join(still)}: {size:,} of {sum(p.numel() for p in named.values()):,} parameters"
        lines["frozen"] += f"; statistics of {len(norms)} normalisation layer{'s' * (len(norms) > 1)}" * bool(norms)
    rate = f"{recipe.peak_lr:g}"
    if optimizer.lr_per is not None:
        rate += f": {optimizer.lr:g} for {optimizer.lr_per} images a step, and batch_size={recipe.batch_size}"
    if optimizer.layer_decay is not None:
        low = recipe.peak_lr * optimizer.layer_decay ** ((count := len(blocks(model))) - 1)
        rate += f"; that in the last of {count} blocks, times {optimizer.layer_decay:g} in each before it: {low:.3g}"
    if optimizer.lr_per is not None or optimizer.layer_decay is not None:
        lines["lr"] = rate
    if optimizer.name == "muon":
        matrices = hidden_matrices(model, recipe)
        size = sum(named[name].numel() for name in matrices)
        lines["muon"] = f"{len(matrices)} hidden layers, {size:,} parameters; AdamW has the others, at the same lr"
    return lines
