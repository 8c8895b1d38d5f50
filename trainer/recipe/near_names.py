"""A word that is not a key: the key that it misspells, or keys with a similar meaning."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from trainer.recipe.other_names import OTHER_KEYS, SUBJECTS
from trainer.recipe.text import misspelt

MOST = 3  # keys that speak of the same
# Words in names of keys that say the same, each after the one that stands for them.
_SAME = {
    "val": "valid validation",
    "fraction": "pct percent ratio frac proportion",
    "number": "n num nb",
    "gradient": "grad grads gradients",
    "lr": "learningrate",
    "folder": "dir path root directory",
    "checkpoint": "ckpt checkpoints",
    "weights": "pretrained",
    "image": "img images imgs",
    "class": "classes cls",
    "epoch": "epochs",
    "step": "steps iter iters iterations",
    "interval": "freq frequency every period",
    "ema": "average",
    "max": "maximum",
    "min": "minimum",
    "memory": "mem",
    "augment": "aug augmentation augmentations transform transforms tfms",
}
_STANDS_FOR = {word: first for first, words in _SAME.items() for word in words.split()}
_LITTLE = {*re.findall(r"\w+", "a an and as by each for from in is of on or that the to with null true false")}
_LITTLE |= {"name", "use", "enable", "do", "train", "trainer", "training"}


def key_of_same_words(name: str) -> str:
    """The key that another program calls by the same words in another order or form, as lr_max and max_lr; else ""."""
    words = _words(name)
    return _BY_WORDS.get(words, "") if len(words) > 1 else ""


def said_of(name: str, comments: Mapping[str, str]) -> str:
    """What there is to say of what a name is about, where no key sets it; "" where one does, or nobody knows."""
    words = _words(name)
    subject = max((each for each in _SUBJECTS if each <= words), key=len, default=None)
    if subject is None or ((subject != words or name.lower() in OTHER_KEYS) and _guess(name, comments, ())):
        return ""
    return _SUBJECTS[subject]


def advice_on(name: str, comments: Mapping[str, str], others: Iterable[str] = ()) -> str:
    """What to say of a word that is no key: the one that it misspells, else keys that speak of the same and their page.

    `comments` are all keys with what is said of them, `others` words that may stand where a key does.
    """
    if known := said_of(name, comments):
        return known
    if guess := _guess(name, comments, others):
        return f"did you mean {guess}?"
    near = speaking_of(name, _within(name, comments)) or speaking_of(name, comments)
    if not near:
        return "python -m trainer recipes keys lists them, and python -m trainer guide answers questions"
    page = near[0].rpartition(".")[0] or near[0]
    return f"nearest in meaning: {', '.join(near)}; python -m trainer recipes keys {page} tells more"


def _guess(name: str, comments: Mapping[str, str], others: Iterable[str]) -> str | None:
    """The key that a name misspells, or has another word for."""
    last = name.rpartition(".")[2]
    alike = [key for key in comments if key.rpartition(".")[2] == last and last != "name"]
    within = _within(name, comments)
    theirs = OTHER_KEYS.get(name.lower(), key_of_same_words(name))
    parts = {key.rpartition(".")[2]: key for key in within}
    guess = parts.get(misspelt(last, parts) or "") if parts else misspelt(last, [*comments, *others])
    guess = theirs if theirs in comments else guess
    if guess and guess != theirs and set() < _words(guess.rpartition(".")[2]) < _words(last):
        guess = None  # with a word more it says something else
    return alike[0] if guess is None and len(alike) == 1 else guess


def _within(name: str, comments: Mapping[str, str]) -> dict[str, str]:
    """The keys of the section that a name begins with."""
    section = name.rpartition(".")[0]
    return {key: comment for key, comment in comments.items() if section and key.startswith(f"{section}.")}


def speaking_of(name: str, comments: Mapping[str, str]) -> list[str]:
    """The keys whose names, other names and comments have most of a name's words, the rare ones above all."""
    texts = {
        key: Counter(_split(f"{comment} {4 * f' {key}'} {2 * _OTHERS.get(key, '')}"))
        for key, comment in comments.items()
    }
    scores: dict[str, float] = {}
    rarity: dict[str, float] = {}  # of the name's words, as far as any text has them
    for word in _words(name):
        holders = {key: count for key, text in texts.items() if (count := _alike(word, text))}
        if holders:
            rarity[word] = math.log(1 + len(texts) / len(holders))
        for key, count in holders.items():
            scores[key] = scores.get(key, 0) + rarity[word] * min(count, 4) / 4
    best = sorted(scores, key=lambda key: (-scores[key], key))[:MOST]
    named = [key for key in best if _words(key.rpartition(".")[2]) <= _words(name)]
    whole = sum(rarity.get(word, 1.5 * math.log(1 + len(texts))) for word in _words(name))
    near = [key for key in best if scores[key] > max(0.5 * scores[best[0]], 0.45 * whole)]
    return list(dict.fromkeys([*named, *near]))


def _alike(word: str, text: Counter[str]) -> int:
    """How often a text has the word, or one of its forms."""
    return sum(count for other, count in text.items() if other == word or _form(word, other))


def _form(word: str, other: str) -> bool:
    short, long = sorted((word, other), key=len)
    return len(short) > 3 and long.startswith(short) and len(long) - len(short) < 5


def _split(text: str) -> list[str]:
    parts = re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", text).lower())
    return [word for part in parts if (word := _STANDS_FOR.get(part, part)) not in _LITTLE]


def _words(name: str) -> frozenset[str]:
    return frozenset(_split(name))


_SUBJECTS = {_words(name): text for text, names in SUBJECTS.items() for name in names.split()}
_OTHERS: dict[str, str] = {}
for _name, _key in OTHER_KEYS.items():
    _OTHERS[_key] = f"{_OTHERS.get(_key, '')} {_name}"
_BY_WORDS: dict[frozenset[str], str] = {}
for _name, _key in OTHER_KEYS.items():
    _known = _BY_WORDS.setdefault(_words(_name), _key)
    if _known != _key:
        _BY_WORDS[_words(_name)] = ""  # several keys: nobody knows which
