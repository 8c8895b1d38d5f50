"""Caches of small folders of photos."""

import numpy as np

from tests.command_line import QUIET, latest
from tests.data.photo_folders import photo
from trainer.data.cache import homes
from trainer.data.cache.stored import Format, pack
from trainer.data.folders.photo_folders import PhotoFolder
from trainer.recipe import DataRecipe


def folder_of(root):
    for label, name in enumerate(("cat", "dog")):
        for number in range(12):
            photo(
                root / name / f"{number}.{('png', 'jpg')[number % 2]}",
                size=(60, 50),
                seed=20 * number + label,
            )
    return root


def words_for(photos, *more):
    words = [
        "mode=single",
        "model.name=cnn_gn",
        "data.name=imagefolder",
        f"data.root={photos}",
        "data.image_size=44",
        "augment.crop=resized",
        "batch_size=8",
        "epochs=2",
        f"data.cache_dir={photos.parent / 'cache'}",
        *QUIET,
    ]
    return latest(*words, "data.workers=1", *more)


HOW = Format("raw", 24, 3)


def opened(photos):
    data = DataRecipe(
        cache="disk",
        cache_dir=str(photos.parent / "cache"),
        root=str(photos),
    )
    return homes.opened(data, HOW, packing_of(photos))


def packing_of(root):
    return pack([PhotoFolder(root, [f"cat/{n}.jpg" for n in range(3)], np.zeros(3))], HOW)


def once(monkeypatch, place, name, action):
    """Let `action` happen once, right after the function `name` of `place` was called."""
    real = getattr(place, name)
    done = []

    def hooked(*words, **named):
        result = real(*words, **named)
        if not done:
            done.append(True)
            action()
        return result

    monkeypatch.setattr(place, name, hooked)
    return done
