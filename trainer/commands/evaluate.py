"""The command `evaluate`: evaluate a trained run again, on other data or other devices."""

from pathlib import Path

import torch

from trainer import modes
from trainer.commands import class_metrics
from trainer.data import Loader
from trainer.distributed.world_setup import create_world
from trainer.errors import RecipeError
from trainer.models.zoo import load_weights
from trainer.processes.terminal import say
from trainer.processes.torch_context import plain_context
from trainer.recipe.checks import check_processes
from trainer.recipe.recipe_files import format_argument, split_arguments
from trainer.saving.run_names import find_run, split_choice
from trainer.tasks.metrics import tabulate_classes
from trainer.training.evaluation import Sums, build_forward, evaluate, strip_prefix
from trainer.training.initial_model import build_for_dataset
from trainer.training.randomness import restore_global_state
from trainer.training.same_images import check_same_images
from trainer.training.setup import create_task, start_process
from trainer.training.trained import Trained


@plain_context()
@restore_global_state()
def evaluate_run(checkpoint: str | Path, *words: str) -> dict[str, float]:
    """Evaluate a trained run again, in this process or as one of torchrun's ranks.

    Args:
        checkpoint: Run folder (for its best weights, or else its last), name of a run below runs,
            checkpoint of a run, or .safetensors file. "runs/x last" names the last weights.
        words: `key=value` overrides of the run's recipe, such as the data, batch size and devices.
            `checkpoint=last` reads the last weights.
            `split=test` evaluates the test split, which a run with a validation split never reads.
            `output=FILE` is written instead of metrics.csv in the run folder.

    Returns:
        The metrics, which are the same on every rank. The keys start with the name of the split, as
        in "val_loss" and "test_loss".

    Raises:
        RecipeError: The checkpoint is not a path, or an override is wrong.
        CheckpointError: There is no such checkpoint, or it has no recipe.
    """
    if not isinstance(checkpoint, str | Path):
        raise RecipeError(
            "evaluate() accepts the path of a run, as in evaluate('runs/x'), not "
            f"{type(checkpoint).__name__}"
        )
    choice, rest = split_choice(words)
    options, overrides = split_arguments(rest, ("split", "output"))
    split = options.get("split", "val")
    if split not in ("val", "test"):
        raise RecipeError(
            f"split={split[:40]}: evaluate accepts split=val (the default) or split=test"
        )
    trained = Trained.read(find_run(f"{checkpoint}{choice}"), overrides)
    path = str(trained.path)
    output = options.get("output")
    weights_file = trained.file or trained.path
    metrics_file, checkpoint_name = class_metrics.choose_file(output, weights_file)
    recipe = trained.recipe
    start_process(recipe)
    world = create_world(recipe)
    size = world.size
    if recipe.shares == "auto" or (recipe.shares is not None and size == 1):
        raise RecipeError(
            f"{format_argument('shares', recipe.shares)}: evaluate divides images among torchrun's "
            "processes by numbers, as in shares=[3,1]; type shares=null"
        )
    # Round the batch size up to a multiple of the number of ranks. This changes no metric, because
    # the evaluation does not count the rows that pad the last batch.
    local_batch = -(-recipe.batch_size // size)
    mode = "single" if size == 1 else "ddp"
    recipe = recipe.replace(
        mode=mode,
        batch_size=local_batch * size,
        accumulate=1,
        recompute=False,
        # The crop is kept because it determines whether photos are decoded on demand or in advance.
        # All other augmentation is irrelevant for an evaluation.
        augment={"crop": recipe.augment.crop},
    )
    check_processes(recipe, size)
    world.connect(recipe.timeout)
    data = world.all_or_none(lambda: trained.data(recipe, split == "test"))
    check_same_images(world, data)
    task = create_task(recipe, data)
    model = build_for_dataset(recipe, task, data, starting=False)
    load_weights(model, trained.weights, path, whole=True)
    strategy = modes.create(modes.Context(recipe, world, task, data.example(local_batch)))
    strategy.setup(model)
    loader = Loader(data, recipe, task, strategy.share, world.device, world.place.local_size)

    def say_once(line: str) -> None:
        if world.is_main:
            say(line)

    forward = build_forward(strategy, say_once)
    forward.begin(len(loader.evaluation_spans))
    sums = Sums(task)
    metrics = evaluate(strategy, loader.evaluation(), sums, forward)
    forward.close()
    skipped = int(world.sum_(torch.tensor(loader.skipped, dtype=torch.float64)))
    loader.close()
    if world.is_main:
        trained.say_choice()
        kind = "test" if split == "test" else "held-out"
        images = f"{metrics['val_samples']:,} {kind} images of {data.name}"
        if skipped:
            images += f"; {skipped:,} more cannot be read"
        if recipe.data.fold:
            say(f"{path}: {data.holdout}")
        say(f"{path}: {split} {task.text(strip_prefix(metrics))} on {images}")

    def report_classes() -> None:
        inputs = sums.inputs or task.build_metric_inputs(sums.whole, sums.count)
        source = recipe.data.root or data.name
        key = {"checkpoint": checkpoint_name, "split": split, "data": source}
        columns = tabulate_classes(inputs)
        figures = strip_prefix(metrics)
        class_metrics.report(output, metrics_file, key, figures, data.classes, columns)

    world.on_main(report_classes)
    world.barrier()
    world.close()
    return {f"{split}_{key.removeprefix('val_')}": value for key, value in metrics.items()}
