"""A model's blocks from its inputs to its outputs, and which of its parameters do not train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from trainer.errors import RecipeError
from trainer.recipe import nearest

LISTS = (nn.Sequential, nn.ModuleList)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Block(NamedTuple):
    """A part of a model that is frozen, or has a learning rate, as a whole."""

    name: str  # of its module
    parameters: list[str]  # names, with those of loose parameters around it


def blocks(model: nn.Module) -> list[Block]:
    """The model's blocks in the order in which it defines them; parameters that are used twice count once.

    A block is a child of the model, or of a list in it (`nn.Sequential`, `nn.ModuleList`), or of a part whose lists
    hold more than half of all weights: a residual block, an encoder layer, a convolution on its own. Loose parameters
    belong to the block before them, or to the first: normalisation between blocks, position embeddings, class tokens.
    """
    listed: list[Block] = []
    waiting: list[str] = []  # loose ones before the first block
    for name, parameters, loose in _parts(model, "", sum(p.numel() for p in model.parameters()) / 2):
        if loose and not listed:
            waiting += parameters
        elif loose:
            listed[-1].parameters.extend(parameters)
        else:
            listed.append(Block(name, [*waiting, *parameters]))
            waiting = []
    if waiting:
        listed.append(Block("", waiting))
    once: set[str] = {name for name, _ in model.named_parameters()}
    return [Block(name, [p for p in parameters if p in once]) for name, parameters in listed]


def _parts(module: nn.Module, prefix: str, half: float) -> Iterator[tuple[str, list[str], bool]]:
    """Parts with parameters in the order of their definition: name, parameters, whether they are loose."""
    direct = [f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False)]
    if direct:
        yield prefix.removesuffix("."), direct, True
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        parameters = dict(child.named_parameters(prefix=path))
        if not parameters:
            continue
        if type(child) in LISTS or _in_lists(child) > half:
            yield from _parts(child, f"{path}.", half)
        else:
            yield path, list(parameters), all(p.ndim <= 1 for p in parameters.values())


def _in_lists(module: nn.Module) -> int:
    """Number of weights in lists of layers within a module."""
    return sum(
        sum(p.numel() for p in child.parameters()) if type(child) in LISTS else _in_lists(child)
        for child in module.children()
    )


def head(model: nn.Module) -> str:
    """The name of the last linear or convolutional layer; empty where there is none."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, *CONVOLUTIONS))]
    return layers[-1] if layers else ""


def freeze(model: nn.Module, wanted: int | Sequence[str], name: str) -> None:
    """Freeze some parameters (requires_grad=False): so many first blocks, all but the last so many where negative, or
    those of names or patterns of modules and parameters, as in `layer1` or `encoder.layers.*.mlp`.

    Raises RecipeError where there are not so many, a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    if isinstance(wanted, int):
        row = blocks(model)
        count = wanted if wanted > 0 else len(row) + wanted
        if not 0 < count < len(row):
            raise RecipeError(
                f"model.freeze={wanted}: {name} has {len(row)} blocks of layers ({_listed([b.name for b in row])}), "
                f"and the last has to train: model.freeze={len(row) - 1} is the most"
            )
        chosen = {parameter for block in row[:count] for parameter in block.parameters}
    else:
        chosen = {parameter for pattern in wanted for parameter in _fitting(model, pattern, name)}
    left = [parameter for parameter in parameters if parameter not in chosen and parameters[parameter].requires_grad]
    if not left:
        raise RecipeError(f"model.freeze leaves nothing of {name} to train: take its last layer out of the list")
    for parameter in chosen:
        parameters[parameter].requires_grad_(False)
    for norm in _frozen_by_position(model):
        norm.keeps_statistics = True  # type: ignore[assignment]


def _fitting(model: nn.Module, pattern: str, model_name: str) -> list[str]:
    """Names of the parameters that a pattern matches, or whose modules it matches."""
    names = [name for name, _ in model.named_parameters()]
    fits = [name for name in names if any(fnmatchcase(above, pattern) for above in _path(name))]
    if not fits:
        every = dict.fromkeys(above for name in names for above in _path(name))
        guess = nearest(pattern, every)
        tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
        hint = f"did you mean {guess}?" if guess else f"it has {_listed(tops)}"
        raise RecipeError(f"model.freeze: nothing in {model_name} that trains is called '{pattern}'; {hint}")
    return fits


def _path(name: str) -> list[str]:
    """A parameter's name and those of all modules around it."""
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def frozen(model: nn.Module) -> list[str]:
    """What is frozen, in as few names as possible: whole modules, else parameters."""
    names: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        names.extend(f"{prefix}{name}" for name, p in module.named_parameters(recurse=False) if not p.requires_grad)
        for name, child in module.named_children():
            training = [p.requires_grad for p in child.parameters()]
            if training and not any(training):
                names.append(f"{prefix}{name}")
            elif training:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return names


def frozen_norms(model: nn.Module) -> list[_NormBase]:
    """Normalisation layers whose running statistics `freeze` froze."""
    return [layer for layer in model.modules() if isinstance(layer, _NormBase) and keeps_statistics(layer)]


def hold_statistics(model: nn.Module) -> None:
    """Let `frozen_norms` use their running statistics in training too; dropout inside of such a layer stays on."""
    for layer in frozen_norms(model):
        layer.training = False  # not `eval()`, which is for its children as well


def keeps_statistics(layer: nn.Module) -> bool:
    """Whether `freeze` froze this layer's running statistics."""
    return bool(getattr(layer, "keeps_statistics", False))


def _frozen_by_position(model: nn.Module) -> Iterator[_NormBase]:
    """Batch normalisation, and instance normalisation with running statistics, that is frozen.

    One without weight and bias is frozen with the module around it, or where that trains in part, with the layer before
    it; without any layer before it, with the first that has parameters.
    """
    trains = [[p.requires_grad for p in layer.parameters(recurse=False)] for layer in model.modules()]
    before = next((not any(flags) for flags in trains if flags), False)  # whether the layer before is frozen
    for (name, layer), flags in zip(model.named_modules(), trains, strict=True):
        before = not any(flags) if flags else before
        tracks = isinstance(layer, _BatchNorm) or (isinstance(layer, _NormBase) and layer.running_mean is not None)
        if tracks and (before if flags else _like_its_module(model, name, before)):
            yield layer


def _like_its_module(model: nn.Module, name: str, before: bool) -> bool:
    while name:
        name = name.rpartition(".")[0]
        training = {p.requires_grad for p in model.get_submodule(name).parameters()}
        if training:
            return before if len(training) == 2 else not training.pop()
    return before


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:4])}, ... {', '.join(names[-2:])}"
