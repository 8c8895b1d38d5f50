"""Recipe files and words: which file a name means, what it holds, and what `key=value` sets.

They are read so that nothing grows without limit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import RecipeError, without_secrets
from trainer.recipe.reflection import kinds
from trainer.recipe.text import nearest, one_line, shown, typed

# YAML's own, in C where it is there, as OmegaConf takes it: it also takes a tab before a value.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_BYTES, MAX_ALIASES, MAX_DEPTH = 256 * 1024, 20, 20


def find(name: str, folder: Path = Path(), said: str = "recipe=") -> Path:
    """The file that `recipe=` names, or `extends:` in a file of `folder`: a shipped name, a file, or a run folder."""
    shipped = shipped_recipes()
    try:
        beside = folder / Path(name).expanduser()
        for file in (shipped.get(name, beside / "recipe.yaml"), beside):
            if file.is_file():
                return file
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(f"{said}{shown(name)} cannot be read in {folder.absolute()}: {one_line(error)}") from None
    guess = nearest(Path(name).stem, shipped)
    hint = f"did you mean {said.rpartition(': ')[2] or 'extends: '}{guess}? " if guess else ""
    where = "" if said == "recipe=" else f" in {folder.absolute()}"
    raise RecipeError(f"{said}{name}: no such recipe or file{where}; {hint}shipped: python -m trainer recipes")


@cache
def shipped_recipes() -> Mapping[str, Path]:
    """Names of the recipes that come with the package, with their files."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}


def shipped_folder() -> Path:
    """The folder of the shipped recipes: within the installed package, or beside it in a clone."""
    here = Path(__file__).parent.parent
    return here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"


def label_of(path: Path) -> str:
    """What messages call a file: the name of a shipped recipe, else its path."""
    file = shipped_recipes().get(path.stem)
    return path.stem if file is not None and path.resolve() == file.resolve() else str(path)


def read(path: Path) -> Any:
    """A file's tree. Raises RecipeError where it holds no recipe, with the line and what to write there."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path}: {path.stat().st_size} bytes is too large for a recipe (at most {MAX_BYTES})")
        text = path.read_text(encoding="utf-8-sig")
        check_shape(text, str(path))
        bare = isinstance(yaml.compose(text, Loader=LOADER), yaml.ScalarNode)  # OmegaConf takes a text for a key
        tree = None if bare else OmegaConf.to_container(OmegaConf.load(path))
        tree = stored(tree) if path.name == "recipe.yaml" else tree
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}: line {line}: not UTF-8: save the file as UTF-8 text in your editor") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{path}: {_explained(error)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or 'holds no key: value pairs'}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path}: not a YAML recipe ({one_line(error)})") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a list of 'key: value' lines")
    if not tree:
        raise RecipeError(f"{path}: the file is empty; python -m trainer recipes digits prints one to start from")
    return tree


def stored(tree: Any) -> Any:
    """What a run has stored, without the passwords that older versions kept in it."""
    if isinstance(tree, dict):
        return {key: stored(value) for key, value in tree.items()}
    return without_secrets(tree) if isinstance(tree, str) else tree


def check_shape(text: str, name: str) -> None:
    """Refuse what would grow without limit when read (aliases of aliases, ${a}${a}) or overflow the stack."""
    depth = aliases = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH or aliases > MAX_ALIASES:
            raise RecipeError(f"{name}: nested deeper than {MAX_DEPTH}, or more than {MAX_ALIASES} aliases")
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise RecipeError(f"{name}: write the value itself, ${{...}} is not expanded")


def _explained(error: Exception) -> str:
    """What is wrong with a file's YAML: the line, and what it ought to look like."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return one_line(error)
    problem, context = getattr(error, "problem", None) or one_line(error), getattr(error, "context", None) or ""
    if context.startswith("while scanning") or "flow" in context:  # there begins what is not ended
        mark, problem = getattr(error, "context_mark", mark), f"{context}, {problem}"
    return f"line {mark.line + 1}: {problem}; write key: value, indent keys alike, put a text with ': ' in quotes"


def split_words(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The values of the words `names=value`, by name, and all other words as they are.

    Raises:
        RecipeError: one of the former is given twice, or empty.
    """
    values: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in names:
            rest.append(word)
        elif not value and key not in values:
            raise RecipeError(f"{key}= is empty: write a value or leave it out")
        elif values.setdefault(key, value) != value:
            raise RecipeError(f"{key} is given twice, as '{key}={values[key]}' and as '{word}': keep one")
    return values, rest


def positive_integer(key: str, value: int | str | None) -> int | None:
    """The number of a command's word, None where it was not given. Raises RecipeError for any other value."""
    if value is not None and (not re.fullmatch(r"\d{1,6}", str(value)) or int(value) < 1):
        raise RecipeError(f"{key}={str(value)[:40]} must be a whole number, 1 or more")
    return None if value is None else int(value)


def word_value(key: str, text: str) -> Any:
    """The value that `key=text` sets. A path is taken as it is, with quotes and spaces.

    Raises:
        RecipeError: it would grow without limit.
        yaml.YAMLError, OmegaConfBaseException: it is no YAML, for keys that take other values than text.
    """
    taken = kinds().get(key, ())
    if text == "null" and type(None) in taken:
        return None
    number = int in taken and re.fullmatch(r"-?\d+", text)
    listed = list[str] in taken and text.startswith("[")
    if str in taken and not listed and not number and not (bool in taken and text in ("true", "false")):
        return text
    check_shape(text, f"{key}={shown(text)}")
    if listed:
        return yaml.load(text, yaml.BaseLoader)  # names that look like numbers stay names
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return tree["value"]


def word_of(key: str, value: Any) -> str:
    """The word that sets a key to a value, as `word_value` reads it again."""
    return f"{key}={value if isinstance(value, str) and str in kinds().get(key, ()) else typed(value)}"
