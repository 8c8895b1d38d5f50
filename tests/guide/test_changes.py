"""The page `changes` has a line for each difference from the version before.

`version_before.json` holds what users of that version rely on, as `python -m
tests.guide.test_changes` prints it.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command_line import ok
from tests.pages import GUIDE
from trainer.cli.command_table import COMMANDS
from trainer.recipe import compare_recipes, load, shipped_recipes
from trainer.recipe.reflection import defaults
from trainer.recipe.schema import Recipe

BEFORE = Path(__file__).with_name("version_before.json")


def describe_version(folder):
    """Return the keys with their defaults, commands, recipes and TensorBoard tags, as JSON types.

    A recipe is described by the keys in which it differs from the defaults.
    """
    recipes = {}
    for name in shipped_recipes():
        changes = compare_recipes(Recipe(), load(name))
        recipes[name] = {key: value for key, (_, value) in changes.items()}
    words = "recipe=digits model.name=cnn_gn mode=pipeline devices=[cpu,cpu] epochs=2"
    words += " logging.every_steps=2 pipeline.microbatches=4 threads=1 optimizer.lr=0.001"
    ok(*words.split(), f"output={folder}")
    tags = EventAccumulator(str(folder)).Reload().Tags()
    version = {
        "keys": defaults(),
        "commands": {name: sorted(command.words) for name, command in COMMANDS.items()},
        "recipes": recipes,
        "tags": dict.fromkeys(sorted([*tags["scalars"], *tags["images"]])),
    }
    return json.loads(json.dumps(version))


@pytest.mark.slow
def test_each_difference_from_the_version_before_has_a_line(tmp_path):
    page = (GUIDE / "changes.md").read_text()
    before = json.loads(BEFORE.read_text())
    now = describe_version(tmp_path / "run")
    missing = []
    for kind, names in now.items():
        for name in sorted({*names, *before[kind]}):
            is_same = name in names and name in before[kind] and names[name] == before[kind][name]
            # One line may name a section of keys, or a group of tags.
            group = name.replace(".", "/").partition("/")[0]
            mentions = [f"`{name}`", f"`{name}=", f"`{group}/", f"`{group.removeprefix('z_')}/"]
            if kind == "recipes":
                mentions = [f"`{name}`", f"`recipe={name}`"]
            if not is_same and not any(mention in page for mention in mentions):
                missing.append(f"{kind}: {name}")
    assert not missing


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        json.dump(describe_version(Path(temporary) / "run"), sys.stdout, indent=1)
