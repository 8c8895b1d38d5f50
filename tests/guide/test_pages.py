"""README and the guide hang together: links lead somewhere, made parts are up to date, figures have
their command.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.command_line import PROJECT
from tests.guide.documents import (
    CONTRIBUTING,
    LANGUAGES,
    PAGES,
    anchors,
    blocks,
    cells,
    commands,
    links,
    name,
    prose,
)
from tests.pages import GUIDE, PART, PARTS, README, filled
from trainer.cli.guide import INDEX, list_topics


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.is_relative_to(PROJECT) and path.exists(), link
        assert not anchor or anchor in anchors(path), f"{link}: there are {sorted(anchors(path))}"


def test_link_targets_of_pages_are_tracked_by_git() -> None:
    if not (PROJECT / ".git").exists():
        pytest.skip("needs a clone")
    kept = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.split()
    linked = [
        page.parent / link.partition("#")[0]
        for page in PAGES
        for link in links(page)
        if link[0] != "h"
    ]
    files = {str(path.resolve().relative_to(PROJECT)) for path in linked if path.is_file()}
    assert files <= {*kept}, files - {*kept}


def test_every_page_is_a_topic_and_every_topic_a_page() -> None:
    assert {*list_topics()} == {page.stem for page in GUIDE.glob("*.md")} - {INDEX}
    assert all(question.endswith("?") and len(question) < 64 for question in list_topics().values())
    linked = {link for link in links(GUIDE / f"{INDEX}.md")}
    assert linked == {f"{topic}.md" for topic in list_topics()}


@pytest.mark.slow(cases=["modes"])
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_made_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- made by") == len(PART.findall(text)) == text.count("<!-- end -->")
    assert text == filled(page), "python -m tests.pages writes it"


def test_every_made_part_is_somewhere() -> None:
    assert {part[1] for page in PAGES for part in PART.findall(page.read_text())} == {*PARTS}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_begins_with_its_title_and_code_has_a_language_and_fits(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ") and not lines[1]
    assert len(re.findall("^# ", prose(page), re.M)) == 1
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page.name}:{block.line}: {block.language}"
        if block.language == "sh" and page.stem != "commands":
            assert max(map(len, block.text.splitlines())) <= 100, f"{page.name}:{block.line}"
    assert page.read_text().count("```") == 2 * len(blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_have_their_command(page: Path) -> None:
    shown = {typed.text for typed in commands(page)}
    head: list[str] = []
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells(line)
            assert "figure" not in head or "command" in head
        elif "figure" in head and not line.startswith("| ---"):
            assert cells(line)[head.index("command")].strip("`") in shown, line


TYPED = [
    *PAGES,
    *sorted((PROJECT / "recipes").glob("*.yaml")),
    *sorted((PROJECT / "trainer").rglob("*.py")),
]


@pytest.mark.parametrize(
    "file", [file for file in TYPED if "torchrun --" in file.read_text()], ids=name
)
def test_torchrun_on_one_machine_is_standalone(file: Path) -> None:
    """Older versions of torchrun use port 29500 without this option, and only one job of a machine
    can have that port.
    """
    for line in re.findall(r"torchrun((?:\s|\\\n|--[\w-]+(?:=\S+)?)+)", file.read_text()):
        if "--nproc_per_node" in line:
            assert ("--standalone" in line) != ("--nnodes" in line), line


def test_readme_begins_with_the_two_commands_of_a_fresh_machine() -> None:
    first = [typed.text for typed in commands(README) if typed.line <= blocks(README)[0].line + 4]
    assert [line for line in first if line.startswith("./launch.sh")] == [
        "./launch.sh recipe=digits",
        "./launch.sh test",
    ]


def test_every_extra_exists() -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = [
        extra for line in extras["all"] for extra in re.search(r"\[(.*)\]", line)[1].split(",")
    ]
    assert {*named} == extras.keys() - {"all", "test"}
    texts = [file.read_text() for file in TYPED]
    shown = {
        name
        for text in texts
        for candidate in re.findall(r"(?:trainer|\.)\[([a-z,]+)\]", text)
        for name in candidate.split(",")
    }
    assert shown <= extras.keys()


def test_readme_is_two_screens() -> None:
    """A screen is 900 pixels high and 1200 wide; its number of lines was measured once."""
    assert len(README.read_text().splitlines()) <= 80
    assert len(re.findall(r"^!\[", README.read_text(), re.M)) == 1


def test_the_guide_is_part_of_the_package() -> None:
    data = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["trainer"]
    shipped = {path for pattern in data for path in GUIDE.parent.glob(pattern)}
    assert {*GUIDE.iterdir()} <= shipped
