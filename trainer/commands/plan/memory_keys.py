"""Choose values for auto keys that depend on memory, and suggest arguments that save memory."""

from dataclasses import replace
from typing import Any

from trainer.commands.plan.fake_model import Cut, FakeModel
from trainer.commands.plan.planned_layout import lay_out
from trainer.errors import RecipeError
from trainer.memory.needs import find_fewest
from trainer.memory.prediction import assess, footprint, fullest
from trainer.recipe.checks import check_processes, list_micro_batch_counts
from trainer.recipe.layout import Layout


def choose_recompute(
    fake: FakeModel, layout: Layout, memory: int | None
) -> tuple[FakeModel, Layout]:
    """Choose a value for recompute=auto, as training does.

    On a GPU, the first N blocks are recomputed, with the smallest N for which the run fits into the
    memory. If no N suffices, all blocks are recomputed. On a CPU, no block is recomputed.

    Args:
        fake: The planned model.
        layout: Recipe, processes and devices.
        memory: Memory of each device in bytes; None for the memory of this machine's devices.

    Returns:
        (fake, layout): the arguments with the chosen value, or unchanged if the recipe does not
        say recompute=auto.
    """

    def recompute_blocks(count: int) -> tuple[FakeModel, Layout]:
        recipe = layout.recipe.replace(recompute=count > 0)
        check_processes(recipe, layout.processes)
        changed = replace(layout, recipe=recipe)
        return FakeModel(changed, fake.images, count), changed

    def may_fit(count: int) -> bool:
        _, _, fits = assess(*recompute_blocks(count), memory)
        return fits is not False

    if layout.recipe.recompute != "auto":
        return fake, layout
    if layout.kind == "cpu":
        return recompute_blocks(0)
    return recompute_blocks(find_fewest(len(fake.runs), may_fit))


def predict_peak_without_recompute(fake: FakeModel, layout: Layout, cut: Cut | None) -> int | None:
    """Return the peak memory in bytes of the fullest device if recompute were false.

    Return None if the recipe does not recompute activations.
    """
    if not layout.recipe.recompute:
        return None
    layout = replace(layout, recipe=layout.recipe.replace(recompute=False))
    plain_fake = FakeModel(layout, fake.images)
    if cut:
        cut = plain_fake.cut(layout, cut.microbatches)
    return fullest(footprint(plain_fake, layout, cut))


def choose_accumulate(fake: FakeModel, layout: Layout, memory: int | None) -> Layout:
    """Choose a value for accumulate=auto, as training does.

    On a GPU, the value is the smallest number of micro-batches with which the run fits into the
    memory, or the largest possible number if the run does not fit. On a CPU, the value is 1.
    """
    if layout.recipe.accumulate != "auto":
        return layout
    changed = replace(layout, recipe=layout.recipe.replace(accumulate=1))
    if layout.kind != "cuda":
        return changed
    for number in list_micro_batch_counts(layout.recipe, layout.data_shares):
        changed = replace(layout, recipe=layout.recipe.replace(accumulate=number))
        _, _, fits = assess(fake, changed, memory)
        if fits is not False:
            break
    return changed


def suggest_arguments(fake: FakeModel, layout: Layout, memory: int) -> list[dict[str, Any]]:
    """Return arguments that each alone make the run fit into `memory` bytes per device.

    Each item is a dictionary: "words" is the argument, and "peak" is the peak memory in bytes of
    the fullest device with this argument. Arguments that do not change the mathematics come first.
    """
    recipe = layout.recipe
    is_cuda = layout.kind == "cuda"
    candidates: list[tuple[str, Any]] = [
        ("accumulate", recipe.pieces * 2**exponent) for exponent in range(1, 10)
    ]
    if recipe.recompute is not True and recipe.graphs is not True:
        candidates.append(("recompute", True))
    if recipe.traits.exchanges == "shards" and is_cuda:
        candidates.append(("fsdp__offload", True))
    candidates.append(("precision", "bf16"))
    suggestions: list[dict[str, Any]] = []
    for key, value in candidates:
        # Only the smallest number of micro-batches that fits is suggested.
        if suggestions and key == "accumulate":
            continue
        try:
            changed = lay_out(recipe.replace(**{key: value}), layout.processes, is_cuda)
            devices, _, fits = assess(FakeModel(changed, fake.images), changed, memory)
        except RecipeError:
            continue
        if fits:
            argument = f"{key.replace('__', '.')}={value}".lower()
            suggestions.append({"words": argument, "peak": fullest(devices)})
    return suggestions
