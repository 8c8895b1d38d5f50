"""The script launch.sh installs once and safely, then runs the program.

A stand-in for uv makes an environment in no time.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.command_line import PROJECT, within
from trainer.cli import guide
from trainer.cli.command_table import COMMANDS

WORKERS = min(len(os.sched_getaffinity(0)) + 2, 8)  # tests at once
# `uv venv` makes an environment whose python records its arguments; both commands are recorded.
UV = """#!/bin/bash
echo "uv $*" >> "$LOG"
sleep "${SLOW:-0}"
for last; do :; done
if [ "$1" = venv ]; then
    mkdir -p "$last/bin" "$last/lib/python3.11/site-packages"
    printf '#!/bin/bash\\necho "$PWD: $*"\\nexit ${CODE:-0}\\n' > "$last/bin/python"
    chmod +x "$last/bin/python"
elif [ -n "${BREAK:-}" ]; then
    echo "unknown package" >&2
    exit 2
fi
"""


class Checkout:
    """A copy of the files that launch.sh needs, with a PATH of few programs."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "a checkout"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.home.mkdir()
        self.bin.mkdir()
        shutil.copy(PROJECT / "launch.sh", self.home)
        shutil.copy(PROJECT / "pyproject.toml", self.home)
        (self.home / "recipes").mkdir()
        (self.home / "recipes" / "digits.yaml").write_text("# the digits\nepochs: 1\n")
        self.tool("uv", UV)
        self.log.touch()

    def tool(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(
        self, *words: str, path: str = "/usr/bin:/bin", **variables: str
    ) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.bin}:{path}",
            "LOG": str(self.log),
            "HOME": str(self.home),
            **variables,
        }
        return subprocess.Popen(
            [str(self.home / "launch.sh"), *words],
            cwd=self.home.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *words: str, path: str = "/usr/bin:/bin", **variables: str
    ) -> tuple[int, str, str]:
        process = self.start(*words, path=path, **variables)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def installs(self) -> int:
        return self.log.read_text().count("uv pip install")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_usage_installs_nothing(checkout: Checkout, words: tuple[str, ...]) -> None:
    code, output, errors = checkout.run(*words)
    assert (code, errors) == (0, "")
    assert output.startswith("usage: ./launch.sh recipe=NAME")
    assert {*COMMANDS} - {"train", "help"} <= {*re.findall(r"\w+", output)}
    message = dict(re.findall(r"^ +\./launch\.sh (\S.*?)  +(\S.*)$", output, re.M))
    known_names = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", guide.format_overview(""), re.M))
    assert len(shared := message.keys() & known_names.keys()) > 7
    assert all(message[words].startswith(known_names[words]) for words in shared)
    assert max(map(len, output.splitlines())) <= 120
    assert re.search(r"digits +the digits\n$", output)
    assert not (checkout.home / ".venv").exists()


def test_first_use_installs_and_later_ones_start_at_once(checkout: Checkout) -> None:
    code, output, errors = checkout.run("recipe=digits", "data.root=a b")
    assert (code, output) == (
        0,
        f"{checkout.home.parent}: -P -m trainer recipe=digits data.root=a b\n",
    )
    assert errors.count("\n") == 2
    assert f"-e {checkout.home}\n" in checkout.log.read_text()
    assert checkout.run("recipe=digits") == (
        0,
        f"{checkout.home.parent}: -P -m trainer recipe=digits\n",
        "",
    )
    assert checkout.installs() == 1
    assert checkout.run("recipe=digits", CODE="143")[0] == 143


def test_the_first_test_installs_the_test_packages(checkout: Checkout) -> None:
    checkout.run("recipes")
    (checkout.home / ".venv" / "kept").touch()
    for _ in range(2):
        assert checkout.run("test")[0] == checkout.run("recipes")[0] == 0
    assert checkout.installs() == 2 and (checkout.home / ".venv" / "kept").exists()
    assert checkout.log.read_text().endswith(f"-e {checkout.home}[test]\n")


def test_commands(checkout: Checkout) -> None:
    checkout.run("test")
    here = checkout.home.parent
    home = checkout.home
    for words, expected in (
        (
            ("test", "--all", "-k", "x"),
            f"{home}: -m pytest --numprocesses={WORKERS} --dist=worksteal --all -k x",
        ),
        (("tensorboard", "--port=1"), f"{here}: -P -m trainer tensorboard --port=1"),
        (("recipes", "digits"), f"{here}: -P -m trainer recipes digits"),
        (("tset",), f"{here}: -P -m trainer tset"),
    ):
        assert checkout.run(*words) == (0, expected + "\n", "")


def test_ctrl_c_waits_for_the_trainer_while_python_starts(checkout: Checkout) -> None:
    checkout.run("recipe=digits")
    python = checkout.home / ".venv" / "bin" / "python"
    python.write_text("#!/bin/bash\ngrep SigBlk /proc/self/status\n")
    _, actual, _ = checkout.run("recipe=digits")
    assert int(actual.split()[-1], 16) == 1 << (signal.SIGINT - 1)


def test_two_first_uses_at_once(checkout: Checkout) -> None:
    both = [checkout.start("recipes", SLOW="0.3") for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [output for output, _ in answers] == [
        f"{checkout.home.parent}: -P -m trainer recipes\n"
    ] * 2
    assert checkout.installs() == 1
    assert sum("launch.sh: waiting" in errors for _, errors in answers) == 1


def test_a_failed_installation_is_shown_and_done_again(checkout: Checkout) -> None:
    code, output, errors = checkout.run("recipes", BREAK="1")
    assert (code, output) == (2, "")
    assert "unknown package" in errors
    assert checkout.run("recipes")[0] == 0
    assert checkout.installs() == 2


def test_a_killed_installation_is_done_again(checkout: Checkout) -> None:
    process = checkout.start("recipes", SLOW="1")
    assert within(20, checkout.installs)
    process.kill()
    process.communicate(timeout=20)
    (checkout.home / ".venv" / "half").touch()
    assert checkout.run("recipes")[0] == 0
    assert checkout.installs() == 2
    assert not (checkout.home / ".venv" / "half").exists()


def test_changed_dependencies_are_installed_again(checkout: Checkout) -> None:
    checkout.run("recipes")
    (checkout.home / ".venv" / "kept").touch()
    with (checkout.home / "pyproject.toml").open("a") as file:
        file.write("# more\n")
    assert checkout.run("recipes")[0] == 0
    assert checkout.installs() == 2
    assert (checkout.home / ".venv" / "kept").exists()
    # Environments cannot be moved.
    checkout.home = checkout.home.rename(checkout.home.parent / "moved")
    assert checkout.run("recipes")[0] == 0
    assert checkout.installs() == 3
    assert not (checkout.home / ".venv" / "kept").exists()
    (checkout.home / ".venv" / "bin" / "python").unlink()  # The environment has lost its Python.
    assert checkout.run("recipes")[0] == 0
    assert checkout.installs() == 4


def test_a_missing_python_is_reported(checkout: Checkout) -> None:
    for name in ("bash", "cat", "dirname", "readlink", "cksum", "flock", "basename", "tail", "rm"):
        actual = shutil.which(name)
        assert actual is not None
        (checkout.bin / name).symlink_to(actual)
    (checkout.bin / "uv").unlink()
    code, output, errors = checkout.run("recipes", path="/nowhere")
    assert (code, output) == (3, "")
    assert errors.count("\n") == 1 and "Python 3.11 or newer" in errors
    assert not (checkout.home / ".venv").exists()


def test_under_slurm_one_launcher_a_node(checkout: Checkout) -> None:
    assert checkout.run("recipes", SLURM_STEP_ID="0", SLURM_LOCALID="1") == (0, "", "")
    assert not (checkout.home / ".venv").exists()
    assert "-m trainer recipes" in checkout.run("recipes", SLURM_STEP_ID="0", SLURM_LOCALID="0")[1]


def test_other_versions_are_tested_in_environments_of_their_own(checkout: Checkout) -> None:
    code, out, _ = checkout.run("test", "--versions")
    asked = [line for line in checkout.log.read_text().splitlines() if "pip install" in line]
    least = re.findall(r'"(torch|torchvision)>=([\d.]+)"', (PROJECT / "pyproject.toml").read_text())
    assert code == 0
    assert len(asked) == 2 and not (checkout.home / ".venv").exists()
    assert ".venv-lowest" in asked[0]
    assert asked[0].endswith(" ".join(f"{name}=={version}" for name, version in least))
    assert ".venv-newest" in asked[1]
    assert asked[1].split()[-3:] == ["--upgrade", "torch", "torchvision"]
    assert checkout.run("test", "--versions=lowest", CODE="1")[0] == 1
    assert checkout.run("test", "--versions=2.0")[0] == 2
    assert out.count(f"-m pytest --numprocesses={WORKERS} --all tests/test_smoke.py") == 2


def test_every_package_is_installed() -> None:
    """setuptools takes the list literally, so a missing folder would be missing from the wheel
    only.
    """
    written = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    actual = {
        ".".join(path.parent.relative_to(PROJECT).parts)
        for path in (PROJECT / "trainer").rglob("__init__.py")
    }
    assert sorted(written) == sorted(actual | {"trainer.recipes"})
