"""List the blocks of a model, and freeze blocks or parameters."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from trainer.errors import RecipeError
from trainer.recipe import find_nearest
from trainer.recipe.text import list_some

LISTS = (nn.Sequential, nn.ModuleList)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Block(NamedTuple):
    """Part of a model that can be frozen, or can have its own learning rate.

    Attributes:
        name: Name of the block's module. Empty if all parameters of the model are loose.
        parameters: Names of the block's parameters, and of the loose parameters that
            `list_blocks` assigns to it.
    """

    name: str
    parameters: list[str]


def list_blocks(model: nn.Module) -> list[Block]:
    """List the model's blocks in the order of their definition.

    A block is a child of the model, or of a list in the model (`nn.Sequential`, `nn.ModuleList`),
    or of a module whose lists contain more than half of all weights. Examples are a residual block,
    an encoder layer, and a single convolution.

    All other parameters are loose, such as position embeddings and class tokens. A child whose
    parameters all have fewer than two dimensions is not a block, so its parameters are loose too,
    such as those of normalization between blocks. Loose parameters are added to the block before
    them, or to the first block if there is none before them. A parameter with several names is
    listed once.
    """
    rows: list[Block] = []
    # Loose parameters before the first block.
    waiting = []
    half = count_parameters(model) / 2
    for name, parameters, is_loose in _iterate_parts(model, "", half):
        if is_loose and not rows:
            waiting += parameters
        elif is_loose:
            rows[-1].parameters.extend(parameters)
        else:
            rows.append(Block(name, [*waiting, *parameters]))
            waiting = []
    if waiting:
        rows.append(Block("", waiting))
    unique = dict(model.named_parameters())
    for row in rows:
        row.parameters[:] = [name for name in row.parameters if name in unique]
    return rows


def _iterate_parts(
    module: nn.Module,
    prefix: str,
    half: float,
) -> Iterator[tuple[str, list[str], bool]]:
    """Yield (name, parameter names, whether they are loose) for each part that has parameters."""
    name = prefix.removesuffix(".")
    direct = dict(module.named_parameters(name, recurse=False))
    if direct:
        yield name, list(direct), True
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        parameters = dict(child.named_parameters(prefix=path))
        if not parameters:
            continue
        if type(child) in LISTS or _count_weights_in_lists(child) > half:
            yield from _iterate_parts(child, f"{path}.", half)
        else:
            yield path, list(parameters), all(p.ndim <= 1 for p in parameters.values())


def _count_weights_in_lists(module: nn.Module) -> int:
    count = 0
    for child in module.children():
        if type(child) in LISTS:
            count += count_parameters(child)
        else:
            count += _count_weights_in_lists(child)
    return count


def count_parameters(module: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def find_head(model: nn.Module) -> str:
    """Return the name of the last linear or convolutional layer, or an empty string."""
    last = ""
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
            last = name
    return last


def freeze(
    model: nn.Module,
    wanted: int | Sequence[str],
    name: str,
) -> None:
    """Freeze parameters (`requires_grad=False`) and the running statistics of their layers.

    Args:
        model: Changed in place.
        wanted: A positive number n freezes the first n blocks. A negative number -n freezes all
            blocks except the last n. A list has names or patterns of modules and parameters to
            freeze, such as `layer1` or `encoder.layers.*.mlp`.
        name: The model's name, for messages.

    Raises:
        RecipeError: The model has too few blocks, a pattern matches nothing, or nothing is left to
            train.
    """
    parameters = dict(model.named_parameters())
    chosen = set()
    if isinstance(wanted, int):
        rows = list_blocks(model)
        count = wanted if wanted > 0 else len(rows) + wanted
        if not 0 < count < len(rows):
            names = list_some([block.name for block in rows], 8)
            raise RecipeError(
                f"model.freeze={wanted}: {name} has {len(rows)} blocks of layers ({names}), and "
                f"the last has to train: model.freeze={len(rows) - 1} is the most"
            )
        for block in rows[:count]:
            chosen.update(block.parameters)
    else:
        for pattern in wanted:
            chosen.update(_match(model, pattern, name))
    if not any(p.requires_grad for key, p in parameters.items() if key not in chosen):
        raise RecipeError(
            f"model.freeze leaves nothing of {name} to train: take its last layer out of the list"
        )
    frozen_parameters = {parameters[key] for key in chosen}
    for module in model.modules():
        # The names are stored in the module, because copies of a parameter, and FSDP's shards of
        # it, lose its attributes.
        own_parameters = module.named_parameters(recurse=False)
        frozen_names = [
            name for name, parameter in own_parameters if parameter in frozen_parameters
        ]
        module.frozen_names = frozen_names  # type: ignore[assignment]
    refreeze(model)
    _freeze_statistics(model)


def _match(
    model: nn.Module,
    pattern: str,
    model_name: str,
) -> list[str]:
    """Return the names of the parameters that match a pattern or are in a module that matches."""
    names = list(dict(model.named_parameters()))
    matches = [
        name for name in names if any(fnmatchcase(path, pattern) for path in _list_paths(name))
    ]
    if not matches:
        paths = []
        for name in names:
            paths += _list_paths(name)
        children = dict.fromkeys(name.partition(".")[0] for name in names)
        hint = f"it has {list_some(list(children), 8)}"
        if guess := find_nearest(pattern, dict.fromkeys(paths)):
            hint = f"did you mean {guess}?"
        raise RecipeError(
            f"model.freeze: nothing in {model_name} that trains is called '{pattern}'; {hint}"
        )
    return matches


def _list_paths(name: str) -> list[str]:
    """Return the name of a parameter, and of all modules that contain it."""
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def list_frozen(model: nn.Module) -> list[str]:
    """List the frozen modules, and the frozen parameters of other modules."""
    names = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                names.append(f"{prefix}{name}")
        for name, child in module.named_children():
            flags = [p.requires_grad for p in child.parameters()]
            if flags and not any(flags):
                names.append(f"{prefix}{name}")
            elif flags:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return names


def list_frozen_norms(model: nn.Module) -> list[_NormBase]:
    """List the normalization layers whose running statistics `freeze` froze."""
    norms = [layer for layer in model.modules() if isinstance(layer, _NormBase)]
    return [layer for layer in norms if keeps_statistics(layer)]


def refreeze(model: nn.Module) -> None:
    """Freeze again what `freeze` froze, because the model's own `train` may have changed it.

    Dropout inside a frozen normalization layer stays active.
    """
    for layer in list_frozen_norms(model):
        # Do not call `eval()`, which would also switch the children of the layer.
        layer.training = False
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name in getattr(module, "frozen_names", ()):
                parameter.requires_grad_(False)


def keeps_statistics(layer: nn.Module) -> bool:
    """Return whether `freeze` froze this layer's running statistics."""
    return bool(getattr(layer, "keeps_statistics", False))


def _freeze_statistics(model: nn.Module) -> None:
    """Let the frozen normalization layers that have running statistics keep them.

    Batch normalization without running statistics is included. A layer without weight and bias
    counts as frozen if the innermost module around it that has parameters is frozen. If only some
    parameters of that module are frozen, the layer counts as frozen if the last layer with
    parameters before it is frozen. If no layer before it has parameters, the first layer of the
    model with parameters decides.
    """
    flags_of_layers = [
        [p.requires_grad for p in layer.parameters(recurse=False)] for layer in model.modules()
    ]
    is_frozen = next((not any(flags) for flags in flags_of_layers if flags), False)
    for (name, layer), flags in zip(model.named_modules(), flags_of_layers, strict=True):
        if flags:
            is_frozen = not any(flags)
        if not isinstance(layer, _NormBase):
            continue
        if not isinstance(layer, _BatchNorm) and layer.running_mean is None:
            continue
        is_norm_frozen = is_frozen
        if not flags:
            is_norm_frozen = _is_surrounding_frozen(model, name, is_frozen)
        if is_norm_frozen:
            layer.keeps_statistics = True  # type: ignore[assignment]


def _is_surrounding_frozen(
    model: nn.Module,
    name: str,
    is_frozen_before: bool,
) -> bool:
    while name:
        name = name.rpartition(".")[0]
        flags = {p.requires_grad for p in model.get_submodule(name).parameters()}
        if len(flags) == 1:
            return not flags.pop()
        if flags:
            return is_frozen_before
    return is_frozen_before
