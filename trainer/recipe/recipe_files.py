"""Recipe files and arguments: find the file of a name, read the file, and parse `key=value`.

Input that would grow without limit is refused.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import RecipeError, remove_secrets
from trainer.recipe.reflection import list_key_types
from trainer.recipe.text import find_nearest, format_value, format_yaml, one_line

# OmegaConf uses PyYAML's C loader if it is installed. Unlike the loader in Python, it accepts a tab
# before a value, so the checks here must use the same loader.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Maximum size of a recipe file in bytes, number of YAML aliases, and depth of nesting. A file above
# a limit is refused. The longest recipe is far below them.
MAX_BYTES = 256 * 1024
MAX_ALIASES = 20
MAX_DEPTH = 20


def find_recipe(name: str, folder: Path = Path(), said: str = "recipe=") -> Path:
    """Find the file of a recipe.

    Args:
        name: name of a shipped recipe, a file, or a run folder.
        folder: folder that relative paths start from.
        said: text before the name in messages, such as "mine.yaml: extends: ".

    Raises:
        RecipeError: the file does not exist.
    """
    shipped = shipped_recipes()
    try:
        path = folder / Path(name).expanduser()
        # A shipped name has precedence over a run folder of that name.
        for file in (shipped.get(name, path / "recipe.yaml"), path):
            if file.is_file():
                return file
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"{said}{format_value(name)} cannot be read in {folder.absolute()}: {one_line(error)}"
        ) from None
    guess = find_nearest(Path(name).stem, shipped)
    hint = ""
    if guess:
        hint = f"did you mean {said.rpartition(': ')[2] or 'extends: '}{guess}? "
    where = ""
    if said != "recipe=":
        where = f" in {folder.absolute()}"
    raise RecipeError(
        f"{said}{name[:200]}: no such recipe or file{where}; {hint}shipped: "
        "python -m trainer recipes"
    )


@cache
def shipped_recipes() -> Mapping[str, Path]:
    """Return the files of the recipes in the package, by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}


def shipped_folder() -> Path:
    """Return the folder of the shipped recipes."""
    package = Path(__file__).parent.parent
    if (package / "recipes").is_dir():
        return package / "recipes"
    # The folder is next to the package in a clone of the repository.
    return package.parent / "recipes"


def format_recipe_path(path: Path) -> str:
    """Return the name of a file in messages: the name of a shipped recipe, or a path."""
    file = shipped_recipes().get(path.stem)
    if file is not None and path.resolve() == file.resolve():
        return path.stem
    return str(path)


def read_recipe_file(path: Path) -> Any:
    """Read the tree of a recipe file.

    Raises:
        RecipeError: the file is not a recipe. The message names the line and what to write there.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(
                f"{path}: {path.stat().st_size} bytes is too large for a recipe (at most "
                f"{MAX_BYTES})"
            )
        # Editors on Windows write a byte order mark, which this encoding skips.
        text = path.read_text(encoding="utf-8-sig")
        check_shape(text, str(path))
        # Refuse a file that contains only a string. OmegaConf would read the string as a key.
        is_bare_text = isinstance(yaml.compose(text, Loader=LOADER), yaml.ScalarNode)
        if is_bare_text:
            tree = None
        else:
            tree = OmegaConf.to_container(OmegaConf.load(path))
        if path.name == "recipe.yaml":
            tree = remove_passwords(tree)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{path}: line {line}: not UTF-8: save the file as UTF-8 text in your editor"
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{path}: {_explained(error)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or 'holds no key: value pairs'}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path}: not a YAML recipe ({one_line(error)})") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a list of 'key: value' lines")
    if not tree:
        raise RecipeError(
            f"{path}: the file is empty; python -m trainer recipes digits prints one to start from"
        )
    return tree


def remove_passwords(tree: Any) -> Any:
    """Remove the passwords that older versions stored in a run's recipe."""
    if isinstance(tree, dict):
        return {key: remove_passwords(value) for key, value in tree.items()}
    if isinstance(tree, str):
        return remove_secrets(tree)
    return tree


def check_shape(text: str, name: str) -> None:
    """Refuse YAML that would grow without limit (aliases of aliases, ${a}${a}) or nests deeply.

    Args:
        text: the YAML.
        name: name of the text in messages.

    Raises:
        RecipeError: the text is refused.
    """
    depth = 0
    aliases = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
        if depth > MAX_DEPTH or aliases > MAX_ALIASES:
            raise RecipeError(
                f"{name}: nested deeper than {MAX_DEPTH}, or more than {MAX_ALIASES} aliases"
            )
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise RecipeError(f"{name}: write the value itself, ${{...}} is not expanded")


def _explained(error: Exception) -> str:
    """Explain a YAML error of a file: the line number, the problem, and what to write."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return one_line(error)
    problem = getattr(error, "problem", None) or one_line(error)
    context = getattr(error, "context", None) or ""
    # The context is the start of an unfinished construct, where the file must be corrected.
    if context.startswith("while scanning") or "flow" in context:
        mark = getattr(error, "context_mark", mark)
        problem = f"{context}, {problem}"
    remedy = "write key: value, indent keys alike with spaces, put a text with ': ' in quotes"
    if "duplicate" in problem:
        remedy = "keep one"
    return f"line {mark.line + 1}: {problem}; {remedy}"


def split_arguments(
    words: Sequence[str], names: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Split arguments into options and all other arguments.

    Args:
        words: the arguments.
        names: names of the options.

    Returns:
        (values, rest): the values of the options by name, and the other arguments.

    Raises:
        RecipeError: an option is repeated or empty.
    """
    values: dict[str, str] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in names:
            rest.append(word)
        elif not value and key not in values:
            raise RecipeError(f"{key}= is empty: write a value or leave it out")
        elif values.setdefault(key, value) != value:
            raise RecipeError(
                f"{key} is given twice, as '{key}={values[key]}' and as '{word}': keep one"
            )
    return values, rest


def parse_positive_integer(key: str, value: int | str | None) -> int | None:
    """Parse the number of an option. Return None if the option was not typed.

    Raises:
        RecipeError: the value is not a whole number from 1 to 999,999.
    """
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,6}", str(value)) or int(value) < 1:
        raise RecipeError(f"{key}={str(value)[:40]} must be a whole number, 1 or more")
    return int(value)


def parse_value(key: str, text: str) -> Any:
    """Parse the value of an argument `key=text`.

    If the key accepts strings, the result is `text` itself, including its quotes and spaces. There
    is one exception: null, a number, a boolean or a list is parsed if the key also accepts it.

    Raises:
        RecipeError: the value would grow without limit.
        yaml.YAMLError, OmegaConfBaseException: the value is not YAML, and the key accepts other
            values than strings.
    """
    types = list_key_types().get(key, ())
    if text == "null" and type(None) in types:
        return None
    is_number = int in types and re.fullmatch(r"-?\d+", text)
    is_list = list[str] in types and text.startswith("[")
    is_bool = bool in types and text in ("true", "false")
    if str in types and not is_list and not is_number and not is_bool:
        return text
    check_shape(text, f"{key}={format_value(text)}")
    if is_list:
        # The base loader reads names that look like numbers as strings.
        return yaml.load(text, yaml.BaseLoader)
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return tree["value"]


def format_argument(key: str, value: Any) -> str:
    """Format the argument that sets a key to a value, which `parse_value` can parse."""
    if isinstance(value, str) and str in list_key_types().get(key, ()):
        return f"{key}={value}"
    return f"{key}={format_yaml(value)}"
