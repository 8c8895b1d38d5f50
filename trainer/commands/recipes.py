"""Command `recipes`: print the list of shipped recipes, one recipe, the keys, or the JSON Schema.

A recipe is printed with a comment for each key, and with the origin of each value that differs from
the default. The JSON Schema of recipe files is next to the shipped recipes. The second line of each
recipe names the schema for editors with the YAML language server: VS Code with Red Hat's YAML
extension, Neovim, Emacs, Helix.
"""

from collections.abc import Sequence

from trainer.errors import RecipeError
from trainer.processes.terminal import fill, fit, terminal_width
from trainer.recipe import Recipe, compare_recipes, flatten, format_value, load, shipped_recipes
from trainer.recipe.explaining import suggest_key
from trainer.recipe.key_reference import keys, sections
from trainer.recipe.loading import origins
from trainer.recipe.recipe_files import shipped_folder
from trainer.recipe.text import format_yaml

# Column in which comments start, unless a value is longer.
COMMENT_COLUMN = 34
# File name of the JSON Schema, which `python -m tests.pages` writes.
SCHEMA = "recipe.schema.json"
# Maximum number of arguments after a subcommand. Any number of overrides may follow the name of a
# recipe.
MAX_ARGUMENTS = {"keys": 1, "schema": 0}


def command(words: Sequence[str]) -> str:
    """Return the output of the command `recipes`.

    Raises:
        RecipeError: An argument is not allowed, or names no recipe or key.
    """
    if not words:
        return fit(listed()) + "\n"
    verb = words[0]
    rest = words[1:]
    limit = MAX_ARGUMENTS.get(verb)
    if limit is not None and len(rest) > limit:
        raise RecipeError(
            f"recipes {verb}: '{format_value(rest[-1])}' is one word too many: type recipes "
            f"{' '.join(words[: 1 + limit])}"
        )
    if verb == "keys":
        return shown_keys(*rest)
    if verb == "schema":
        return (shipped_folder() / SCHEMA).read_text(encoding="utf-8")
    return commented(verb.removeprefix("recipe="), *rest)


def listed(indent: str = "") -> str:
    """Format a line for each shipped recipe: its name and its description."""
    shipped = shipped_recipes()
    width = max(map(len, shipped))
    lines = []
    for name, path in shipped.items():
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{indent}{name:{width}}  {first_line.lstrip('# ')}")
    return "\n".join(lines)


def commented(name: str, *words: str) -> str:
    """Format a recipe as YAML that `load` accepts, with a comment for each key.

    Args:
        name: Name of the recipe.
        words: Arguments that change keys.
    """
    recipe = load(name, *words)
    sources = origins(name, *words)
    reference = keys()
    comments = sections()
    changed = compare_recipes(Recipe(), recipe)
    lines = [f"# {recipe.name} with every key; `<- x` says that x set it, the rest is the default"]
    section = ""
    for key, value in flatten(recipe.to_dict()).items():
        parent, _, last = key.rpartition(".")
        if parent and parent != section:
            lines.append(_line(f"{parent}:", comments[parent]))
        section = parent
        comment = reference[key].comment
        if key in sources and key in changed:
            comment += f"  <- {sources[key]}"
        text = f"{last}: {format_yaml(value)}"
        if parent:
            text = f"  {text}"
        lines.append(_line(text, comment))
    return "\n".join(lines) + "\n"


def _line(text: str, comment: str) -> str:
    # A wrapped comment has a # on every line, so that the output is valid YAML.
    start = f"{text:{COMMENT_COLUMN}}  # "
    lines = fill(comment, max(40, terminal_width() - COMMENT_COLUMN - 4)).split("\n")
    return start + f"\n{'':{COMMENT_COLUMN}}  # ".join(lines)


def shown_keys(word: str | None = None) -> str:
    """Format the reference of the keys that `word` selects, for a terminal.

    Args:
        word: A key, the last part of a key, or a section. None: all keys.

    Raises:
        RecipeError: No key or section has this name.
    """
    reference = keys()
    chosen = [
        key
        for key in reference.values()
        if word is None or word in (key.name, key.section, key.name.rpartition(".")[2])
    ]
    if not chosen:
        raise RecipeError(
            f"recipes keys {word}: no key; {suggest_key(str(word).replace('-', '_'), reference)}"
        )
    names = max(len(key.name) for key in chosen)
    defaults = max(len(key.default) for key in chosen)
    lines = []
    for section, comment in sections().items():
        rows = [key for key in chosen if key.section == section]
        if rows:
            lines.append(f"{section or 'recipe'}: {comment}")
        for key in rows:
            values = key.values or f"as in {key.example}"
            lines.append(
                f"  {key.name:{names}}  {key.default:{defaults}}  {key.comment} [{values}]"
            )
    return fit("\n".join(lines)) + "\n"
