"""Tar shards: samples by WebDataset's conventions, and the positions of their images.

A sample consists of consecutive files whose names are equal up to the first dot, such as 0001.jpg
and 0001.cls. The class of a sample is the text of the .cls file, or the value of `cls`, `label` or
`class` in the .json file. Samples with any other kind of label are refused, because a class is
never guessed. In a shard without .cls and .json files, every image is a sample, and its directory
is its class.
"""

import json
import os
import posixpath
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import BinaryIO, NamedTuple

import numpy as np

from trainer.data.archives.indexes import Archive, ArchiveIndex, load_or_make, open_shard
from trainer.data.folders.scanning import ARRAY, HIDDEN, LINKS, LeftOut, is_junk, readable_suffixes
from trainer.data.photos.decoding import Bytes
from trainer.data.photos.stacks import LARGEST
from trainer.errors import SetupError

KIND = b"tar"
IMAGE = ".img"
CLASS = ".cls"
JSON = ".json"
# Keys of a .json file that may contain the class; the first one that exists is used.
CLASS_KEYS = ("cls", "label", "class")
# Maximum number of bytes to read of a file that may contain a class.
MAX_LABEL_BYTES = 2**20
SEVERAL = "{} belongs to a sample of several images and one class"
# Number of bytes to read at once: HEADER_BYTES for a header and the small files that follow it,
# ZEROS_BYTES for the zeros after the last file.
HEADER_BYTES = 2**14
ZEROS_BYTES = 2**20


class Member(NamedTuple):
    """A file of a sample.

    Attributes:
        key: name of the sample: the file's path up to the first dot of its name.
        suffix: the rest of the path in lower case, such as ".seg.png".
        last: the last suffix, such as ".png".
        name: path of the file.
        start: offset of the first byte in the shard.
        size: size in bytes.
        text: contents of a file that may contain a class; otherwise empty.
    """

    key: str
    suffix: str
    last: str
    name: str
    start: int
    size: int
    text: bytes


def index(shard: Archive) -> ArchiveIndex:
    """Return the index of a shard's samples.

    Raises:
        SetupError: the shard is damaged, or a sample has an invalid label or several images for
            one class.
        OSError: the shard cannot be read.
    """
    # The installed libraries determine which suffixes can be read, and therefore which files the
    # index contains. An index that was made for other suffixes is not used.
    suffixes = " ".join(sorted({ARRAY, *readable_suffixes()}))
    return load_or_make(shard, f"tar {suffixes}", read_index)


def encoded(shard: Archive, start: int, size: int) -> Bytes:
    """Return the encoded bytes of an image.

    Args:
        shard: the shard.
        start: offset of the first byte in the shard.
        size: number of bytes.

    Raises:
        OSError: the shard cannot be read, or has changed.
        ValueError: the image has more than `LARGEST` bytes.
    """
    if size > LARGEST:
        raise ValueError(f"the file is larger than {LARGEST:,} bytes")
    file = open_shard(shard)
    data = np.empty(size, np.uint8)
    if os.preadv(file.fileno(), [data.data], start) < size:
        raise OSError(f"{shard} was truncated after this run began")
    return data


def read_index(shard: Archive) -> ArchiveIndex:
    """Make the index of a shard from its headers and classes, without reading images.

    Raises:
        SetupError: the shard is damaged, or a sample has an invalid label or several images for
            one class.
        OSError: the shard cannot be read.
    """
    # Check that the path is a regular file, and that the file has not changed.
    open_shard(shard)
    # Start, size, index of the class in `texts`, and index of the directory in `below`, by the
    # image's path.
    rows: dict[bytes, tuple[int, int, int, int]] = {}
    left = LeftOut()
    texts = dict[str, int]()
    below = dict[str, int]()
    additional_images = list[str]()
    with open(shard.path, "rb", HEADER_BYTES) as file:
        if hasattr(os, "posix_fadvise"):
            # Turn off readahead: the kernel would also read the images, which are skipped here.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        try:
            for _, sample in groupby(list_files(file, shard.size, left), lambda member: member.key):
                text, images = parse_sample([*sample], left)
                label = -1
                if text is not None:
                    label = texts.setdefault(text, len(texts))
                    # `parse_sample` refuses several photos with one class, so these additional
                    # images are arrays. They are an error only if the shard contains no photos,
                    # which is known after the last sample. Otherwise, all arrays are ignored.
                    additional_images += [image.name for image in images[1:]]
                for image in images:
                    name = os.fsencode(image.name)
                    if name in rows:
                        raise ValueError(f"the shard contains {image.name} twice")
                    folder = below.setdefault(image.name.rpartition("/")[0], len(below))
                    rows[name] = (image.start, image.size, label, folder)
            arrays = [name for name in rows if name.lower().endswith(ARRAY.encode())]
            if additional_images and len(arrays) == len(rows):
                raise ValueError(SEVERAL.format(additional_images[0]))
        except ValueError as error:
            raise SetupError(
                f"{shard}: {error}: repair the shard, or exclude it with a pattern such as "
                "data.root='/data/train-*.tar'"
            ) from None
    # If the shard also contains photos, remove all arrays, which may be masks or features.
    if len(arrays) < len(rows):
        for name in arrays:
            del rows[name]
            left.other(os.fsdecode(name))
    return ArchiveIndex.of(rows, [*texts], None, [*below] or [""], dict(left))


def list_files(
    file: BinaryIO,
    size: int,
    left: LeftOut,
) -> Iterator[Member]:
    """Yield all regular files of a shard except hidden files and files of operating systems.

    Args:
        file: the shard.
        size: size of the shard in bytes.
        left: counter of ignored files, to which this function adds hidden files and links.

    Raises:
        ValueError: the shard is damaged.
        OSError: the shard cannot be read.
    """
    for member in list_members(file, size):
        name = member.name
        # Normalize the path: ./cat/1.jpg becomes cat/1.jpg.
        if name.startswith((".", "/")) or "/." in name or "//" in name:
            name = posixpath.normpath(name).lstrip("/")
        folder, _, base = name.rpartition("/")
        stem, dot, suffix = base.partition(".")
        if not member.isreg():
            left[LINKS] += member.issym() or member.islnk()
        elif is_junk(base):
            left[HIDDEN] += 1
        else:
            suffix = dot + suffix.lower()
            last = suffix
            if suffix.count(".") > 1:
                last = posixpath.splitext(suffix)[1]
            text = b""
            start = member.offset_data
            # Read the class now, because it is probably still in the file's buffer.
            if last in (CLASS, JSON):
                file.seek(start)
                text = file.read(min(member.size, MAX_LABEL_BYTES))
            yield Member(f"{folder}/{stem}", suffix, last, name, start, member.size, text)


def list_members(file: BinaryIO, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield all members of a tar file in order.

    tarfile treats a damaged header as the end of the file. This function therefore checks that only
    zeros follow the last member.

    Raises:
        ValueError: the tar file is damaged or incomplete, or uses an unsupported format.
        OSError: the file cannot be read.
    """
    offset = 0
    try:
        archive = tarfile.TarFile(fileobj=file)
        while (member := archive.next()) is not None:
            if member.issparse():
                raise ValueError(f"{member.name} is stored with holes, as tar --sparse does")
            available = size
            if member.isreg():
                available -= member.offset_data
            if "\0" in member.name or not 0 <= member.size <= available:
                raise ValueError(f"the shard is cut off or damaged at {member.name}")
            yield member
            offset = archive.offset
            # tarfile appends every member to this list. Clear it to save memory.
            archive.members.clear()  # type: ignore[attr-defined]
    except (tarfile.TarError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"the file is damaged at byte {offset:,}, compressed, or not a tar file ({error})"
        ) from None
    file.seek(offset)
    has_zeros = False
    while block := file.read(ZEROS_BYTES):
        has_zeros = block.count(0) == len(block)
        if not has_zeros:
            break
    if not has_zeros:
        raise ValueError(
            f"the file is cut off or damaged at byte {offset:,}, or cat joined two tar files (join "
            "them with tar -A)"
        )


def parse_sample(sample: list[Member], left: LeftOut) -> tuple[str | None, list[Member]]:
    """Return the class and the images of a sample.

    Args:
        sample: all files of the sample.
        left: counter of ignored files, to which files that are neither images nor labels are added.

    Returns:
        (label, images): the class, or None if the sample has no class, and the images.

    Raises:
        ValueError: the label is invalid, or one class belongs to several images.
    """
    label = None
    # Sorting puts .cls before .json, so that the class in the .cls file is used if both exist.
    for file in sorted(file for file in sample if file.last in (CLASS, JSON)):
        if label is None:
            label = read_class(file)
            if label is not None and file.suffix != file.last:
                raise ValueError(
                    f"{file.name} has a class, but its name is neither NAME{CLASS} nor NAME{JSON} "
                    "with a NAME without dots"
                )
    suffixes = readable_suffixes()
    images = [file for file in sample if file.suffix == IMAGE or file.last in suffixes]
    if not images:
        images = [file for file in sample if file.last == ARRAY]
    for file in sample:
        is_label = bool(images) and file.suffix in (CLASS, JSON)
        if file not in images and not is_label:
            left.other(file.name)
    # In a sample such as 1.jpg and 1.mask.png, only the file without a second suffix is the image.
    if label is not None and len(images) > 1:
        main_images = [file for file in images if file.suffix == file.last]
        if len(main_images) == 1:
            images = main_images
        elif images[0].last != ARRAY:
            raise ValueError(SEVERAL.format(sample[0].name))
    return label, images


def read_class(file: Member) -> str | None:
    """Return the class in a .cls or .json file, or None if a .json file has none.

    Raises:
        ValueError: the class is neither a whole number nor one line of text.
    """
    with suppress(ValueError, RecursionError):
        if file.last == JSON:
            contents = json.loads(file.text)
        else:
            contents = {CLASS_KEYS[0]: file.text.decode()}
        if isinstance(contents, dict):
            keys = [key for key in CLASS_KEYS if key in contents]
            if not keys:
                return None
            label = contents[keys[0]]
            text = str(label).strip()
            is_text = isinstance(label, str | int) and not isinstance(label, bool)
            if is_text and len(text.splitlines()) == 1:
                return text
    raise ValueError(f"the class in {file.name} is neither a whole number nor one line of text")
