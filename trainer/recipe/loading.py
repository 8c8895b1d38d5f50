"""Recipes from files and words: defaults < YAML < `key=value`, checked completely before anything heavy is imported.

`load` returns a frozen `Recipe` or raises a `RecipeError` whose line names the key and the nearest thing that works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import RecipeError
from trainer.recipe.keywords import as_keyword, nested
from trainer.recipe.schema import EXTENDS, Recipe, validated
from trainer.recipe.slips import first_slip
from trainer.recipe.text import flatten, nearest, one_line, shown, typed
from trainer.recipe.unread import check_read, reads

YOURS = "your words"  # the origin of what the command line says
MAX_BYTES, MAX_ALIASES, MAX_DEPTH = 256 * 1024, 20, 20


def load(recipe: str | Path | Mapping[str, Any] | Recipe | None = None, *words: str, **keywords: Any) -> Recipe:
    """Merge defaults < what a file extends < a shipped recipe or YAML file < words < keywords.

    Args:
        recipe: a shipped name ("digits"), a path to a YAML file or run folder, a mapping, a recipe, or None for the
            defaults.
        words: `key=value` with dotted keys, values in YAML: "optimizer.lr=0.05", "devices=[cuda:0,cuda:1]".
        keywords: keys with Python values: `epochs=1`, `optimizer__lr=0.05`, `optimizer={"lr": 0.05}`,
            `**{"optimizer.lr": 0.05}`.

    Raises:
        RecipeError: naming the key, what was found, and the nearest thing that works.
    """
    try:
        return _loaded(recipe, words, keywords)
    except RecipeError:
        for path in _own_files(recipe):
            if (slip := first_slip(_text(path), shipped_recipes())) is not None:
                raise RecipeError(f"{path}: {slip}") from None
        raise


def _loaded(
    recipe: str | Path | Mapping[str, Any] | Recipe | None, words: Iterable[str], keywords: Mapping[str, Any]
) -> Recipe:
    """As `load`, whose message may name a line of a file."""
    name, layers = _layers(recipe, words, keywords)
    try:
        plain = _plain(OmegaConf.merge(*(tree for _, tree in layers)))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{name}: {_clash(layers) or one_line(error)}") from None
    said = _origins(layers)
    sources = {key: name if label == YOURS else label for key, label in said.items()}
    try:
        try:
            made = validated(plain, name, sources)
        except RecipeError:
            made = validated(plain, name, {**sources, **_places(recipe, name, said)})  # the same again, with the line
        check_read(made, (key for key, label in said.items() if label == YOURS))
        return made
    except RecipeError as error:
        raise RecipeError(as_keyword(str(error), keywords)) from None


def origins(recipe: str | Path | Mapping[str, Any] | None = None, *words: str) -> dict[str, str]:
    """What says each key of `load(recipe, *words)` that is no default: dotted key -> a recipe, a file or YOURS."""
    return _origins(_layers(recipe, words, {})[1])


def _layers(
    recipe: str | Path | Mapping[str, Any] | Recipe | None, words: Iterable[str], keywords: Mapping[str, Any]
) -> tuple[str, list[tuple[str, Any]]]:
    """The recipe's name, and the trees to merge, each with its source's name: the last wins."""
    name, chain = "recipe", list[tuple[str, Any]]()
    if isinstance(recipe, str | Path):
        path = find(str(recipe))
        name, chain = path.parent.name if path.name == "recipe.yaml" else path.stem, _chain(path)
        chain[-1] = (name, chain[-1][1])
    elif isinstance(recipe, Recipe):
        name, recipe = recipe.name, recipe.to_dict()
    elif recipe is not None and not isinstance(recipe, Mapping):
        raise RecipeError(f"a recipe is a name, a YAML file or a dictionary, not {type(recipe).__name__}")
    try:
        if isinstance(recipe, Mapping):
            chain = _extended(name, OmegaConf.create(nested(recipe)), None)
        typed_words = _words(words)
        given = nested(keywords)
        twice = flatten(_plain(typed_words)).keys() & flatten(given).keys()
        if twice:
            raise RecipeError(f"{min(twice)} is given twice, as a word and as a keyword: keep one")
        said: Any = OmegaConf.merge(typed_words, OmegaConf.create(given))
    except RecipeError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{name}: {one_line(error)}") from None
    if EXTENDS in said:
        parent = shown(said[EXTENDS])
        raise RecipeError(f"extends={parent} is a line of a YAML file; on the command line it is recipe={parent}")
    return name, [*chain, (YOURS, said)]


def _own_files(recipe: str | Path | Mapping[str, Any] | Recipe | None) -> Iterator[Path]:
    """The files of a recipe that are not shipped: its own, then what that extends, as far as they can be read."""
    if not isinstance(recipe, str | Path):
        return
    with suppress(RecipeError):
        path, seen = find(str(recipe)), set[Path]()
        while path.resolve() not in seen and _label(path) not in shipped_recipes():
            yield path
            seen.add(path.resolve())
            tree = _read(path)
            if not isinstance(parent := tree.get(EXTENDS), str):
                return
            path = _parent(parent, _label(path), path.resolve())


def _places(recipe: Any, name: str, said: Mapping[str, str]) -> dict[str, str]:
    """The file and line of each key that a file of one's own has said last."""
    found: dict[str, str] = {}
    for order, path in enumerate(_own_files(recipe)):
        label, lines = (_label(path) if order else name), dict[str, int]()
        with suppress(yaml.YAMLError):
            lines |= _key_lines(yaml.compose(_text(path), Loader=_loader()), "")
        found |= {key: f"{path}, line {lines[key]}" for key in said if said[key] == label and key in lines}
    return found


def _key_lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """The dotted keys of a YAML map, with their lines."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{key.value}", key.start_mark.line + 1
        yield from _key_lines(value, f"{prefix}{key.value}.")


def _text(path: Path) -> str:
    """A file's text, with what is no UTF-8 in it replaced; empty where it is too large for a recipe."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            return file.read(MAX_BYTES) if path.stat().st_size <= MAX_BYTES else ""
    except OSError:
        return ""


def _clash(layers: Iterable[tuple[str, Any]]) -> str | None:
    """What to say where one source has a list and another has keys."""
    keys = flatten(Recipe().to_dict())
    for _, tree in layers:
        for key, value in flatten(_plain(tree)).items():
            inner = next((name for name in keys if name.startswith(f"{key}.")), None)
            if inner and isinstance(value, list):
                return f"{key}={shown(value)} must be a section, as in {inner}=..."
            section = key.rpartition(".")[0]
            if section in keys:
                return f"{section} has no keys of its own, as {key} would be"
    return None


def _origins(layers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for label, tree in layers:
        found |= dict.fromkeys(flatten(_plain(tree)), label)
    return found


def _plain(tree: Any) -> Any:
    return OmegaConf.to_container(tree)


def _chain(path: Path) -> list[tuple[str, Any]]:
    return _extended(_label(path), _read(path), path.resolve())


def _extended(label: str, tree: Any, path: Path | None) -> list[tuple[str, Any]]:
    """A tree, from the file `path`, after the trees of all that it extends, farthest first, each with its name.

    Raises:
        RecipeError: a parent is not there, or extends its own child.
    """
    chain, seen = [(label, tree)], [path]
    while EXTENDS in tree:
        parent = _plain(tree)[EXTENDS]
        del tree[EXTENDS]
        if not isinstance(parent, str) or not parent:
            raise RecipeError(f"{label}: extends: {shown(parent)} must be one recipe's name or file, as in digits")
        path = _parent(parent, label, path)
        if path in seen:
            circle = " -> ".join([*(Path(name).name for name, _ in reversed(chain)), parent])
            raise RecipeError(f"{label}: extends goes round in a circle: {circle}")
        label, tree = _label(path), _read(path)
        chain.insert(0, (label, tree))
        seen.append(path)
    return chain


def _parent(name: str, label: str, child: Path | None) -> Path:
    """The file that `extends: name` names: a shipped recipe, or one told from the folder of the child's file."""
    shipped = shipped_recipes()
    folder = child.parent if child is not None else Path()
    try:
        beside = folder / Path(name).expanduser()
        for file in (shipped.get(name, beside), beside / "recipe.yaml"):
            if file.is_file():
                return file.resolve()
        ending = next((f"{name}{end}" for end in (".yaml", ".yml") if (folder / f"{name}{end}").is_file()), None)
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(f"{label}: extends: {shown(name)} cannot be read: {one_line(error)}") from None
    guess = ending or _nearest_shipped(name)
    hint = f"did you mean extends: {guess}? " if guess else ""
    raise RecipeError(
        f"{label}: extends: {shown(name)} is no recipe and no file in {folder.absolute()}; "
        f"{hint}shipped: python -m trainer recipes"
    )


def _label(path: Path) -> str:
    """What messages call a file: the name of a shipped recipe, else its path."""
    file = shipped_recipes().get(path.stem)
    return path.stem if file is not None and path.resolve() == file.resolve() else str(path)


def find(recipe: str) -> Path:
    """The file that `recipe=` names: a shipped name, a file, or a run folder holding recipe.yaml."""
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe]
    try:
        path = Path(recipe).expanduser()
        if (path / "recipe.yaml").is_file():
            return path / "recipe.yaml"
        if path.is_file():
            return path
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(f"recipe={recipe[:80]!r} cannot be read: {one_line(error)}") from None
    guess = _nearest_shipped(recipe)
    hint = f"did you mean recipe={guess}? " if guess else ""
    raise RecipeError(f"recipe={recipe}: no such recipe or file; {hint}shipped: {', '.join(shipped)}")


def _nearest_shipped(name: str) -> str | None:
    """The shipped recipe that is meant by a name, or by a path as recipes/digits.yaml."""
    return nearest(name, shipped_recipes()) or nearest(Path(name).stem, shipped_recipes())


def shipped_recipes() -> dict[str, Path]:
    """Names of the recipes that come with the package, with their files."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.yaml"))}


def shipped_folder() -> Path:
    """Where the shipped recipes lie: within the installed package, or beside it in a clone."""
    here = Path(__file__).parent.parent
    return here / "recipes" if (here / "recipes").is_dir() else here.parent / "recipes"


def describe(path: Path) -> str:
    """A recipe's first comment line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def words_of(recipe: Recipe) -> list[str]:
    """What to type for a recipe: its name where it is a shipped one, and every key that differs and matters."""
    shipped = recipe.name in shipped_recipes()
    was, now = flatten((load(recipe.name) if shipped else Recipe()).to_dict()), flatten(recipe.to_dict())
    changed = [f"{key}={typed(value)}" for key, value in now.items() if value != was[key] and reads(recipe, key)]
    return [f"recipe={recipe.name}", *changed] if shipped else changed or [f"mode={recipe.mode}"]


def _read(path: Path) -> Any:
    text = ""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path}: {path.stat().st_size} bytes is no recipe (at most {MAX_BYTES})")
        text = path.read_text(encoding="utf-8-sig")
        _check_shape(text, str(path))
        tree = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: {_no_utf8(error)}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{path}: {_told(error, text)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or 'holds no key: value pairs'}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path}: not a YAML recipe ({one_line(error)})") from None
    if not OmegaConf.is_dict(tree):
        raise RecipeError(f"{path}: a recipe is a list of 'key: value' lines")
    if not tree:
        raise RecipeError(f"{path}: the file is empty; python -m trainer recipes digits prints one to start from")
    return tree


def _no_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with a file that is not UTF-8."""
    number = error.object.count(b"\n", 0, error.start) + 1
    if b"\x00" in error.object and not error.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "a binary file, not a YAML recipe"
    return f"line {number}: not UTF-8: save the file as UTF-8 text in your editor"


def _told(error: Exception, text: str) -> str:
    """What is wrong with a file's YAML, where no slip is found in it: the line, and what it ought to look like."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"line {line}: it holds a character that cannot be seen: take it out"
    if mark is None:
        return one_line(error)
    said = f"line {mark.line + 1}: {getattr(error, 'problem', None) or one_line(error)}"
    if "mapping values are not allowed" in said:
        return f"{said}; keys of one section begin in one column, and a text with ': ' in it is put in quotes"
    return f"{said}; look at this line and those above it"


def _loader() -> Any:
    """YAML's own, in C where it is there, as OmegaConf takes it: it also takes a tab before a value."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_shape(text: str, name: str) -> None:
    """Refuse what would grow without limit when read (aliases of aliases, ${a}${a}) or overflow the stack."""
    depth = aliases = 0
    for event in yaml.parse(text, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH or aliases > MAX_ALIASES:
            raise RecipeError(f"{name}: nested deeper than {MAX_DEPTH} or more than {MAX_ALIASES} aliases is no recipe")
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise RecipeError(f"{name}: '{shown(event.value)}': write the value itself, ${{...}} is not looked up")


def _keep(key: str, word: str) -> str:
    """What to do with one of two words for a key."""
    if key == "data.root" and word.endswith((".tar", ".parquet")):
        return "your shell wrote them for {...}; quote it: data.root='...'"
    return "keep one"


def _quoted(word: str) -> str:
    """A pattern of a shell's, *.tar or {a,b}.tar, as the text that it is; YAML begins other things so."""
    return re.sub(r"^data\.root=([*{][^']*)$", r"data.root='\1'", word)


def _words(words: Iterable[str]) -> Any:
    seen: dict[str, str] = {}
    for word in words:
        if not isinstance(word, str):
            raise RecipeError(f"words are text, each by itself, as in 'epochs=2', not {type(word).__name__}")
        key, equals, _ = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            raise RecipeError(f"'{word}' is not key=value, as in optimizer.lr=0.05")
        if key in seen:
            raise RecipeError(f"{key} is given twice, as '{seen[key]}' and as '{word}': {_keep(key, word)}")
        seen[key] = word
    merged = OmegaConf.create({})
    for key, word in seen.items():
        try:
            word = _quoted(word)
            _check_shape(word.partition("=")[2], key)
            merged.merge_with_dotlist([word])
        except RecipeError:
            raise
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            raise RecipeError(f"'{shown(word)}': {one_line(error)}") from None
    return merged
