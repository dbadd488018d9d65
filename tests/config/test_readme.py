"""The README's promises: its commands run, from a wheel, and print what it shows."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"(?:pip install -e \. && )?(python -m .*)")


def commands() -> list[str]:
    """Every ``python -m`` command line of the README's fenced blocks, once."""
    found = []
    for block in blocks():
        found += [command for command in _commands(block) if command not in found]
    return found


def blocks() -> list[str]:
    return FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def _commands(block: str) -> list[str]:
    return [match[1] for line in block.splitlines() if (match := COMMAND.match(line))]


def samples() -> dict[str, str]:
    """Output blocks by the command that they follow, the first of the block before."""
    found = {}
    for before, block in pairwise(blocks()):
        if _commands(before) and not _commands(block):
            found[_commands(before)[0]] = block
    return found


def missing(sample: str, printed: str) -> list[str]:
    """Lines of ``sample`` that are in no line of ``printed``, whitespace aside.

    The solver's line is not looked for: it is a time of the machine that ran it.
    """
    lines = ["".join(line.split()) for line in printed.splitlines()]
    shown = [line for line in sample.splitlines() if line.split()[:1] not in ([], ["solver"])]
    return [line for line in shown if not any("".join(line.split()) in seen for seen in lines)]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The wheel, unpacked: what a user has who never saw the repository. Workers share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _built(tmp_path_factory.mktemp("build")).rename(folder)
    return folder


def _built(folder):
    source = folder / "source"  # a build leaves files beside what it builds
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for package in ("policies", "sim", "real", "calibrate", "conf", "experiments"):
        ignore = shutil.ignore_patterns("__pycache__", "reports")
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_readme_has_the_commands_of_the_issue():
    assert any("+experiment=ablation" in c for c in commands())
    assert "python -m sim" in commands()
    assert len(commands()) >= 5


def test_readme_shows_the_output_of_three_commands():
    assert list(samples()) == [
        "python -m sim +experiment=ablation", "python -m sim", "python -m sim +experiment=mixed"
    ]  # fmt: skip
    for sample in samples().values():
        assert len(sample.splitlines()) > 8
        assert not missing(sample, sample.replace(" ", "  "))
        digit = re.search(r"\d+\.\d\d", sample)[0]
        assert missing(sample, sample.replace(digit, "9.99"))


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_command_runs_from_a_wheel(command, installed, tmp_path):
    env = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "100"}
    words = [sys.executable, *command.split()[1:]]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not missing(samples().get(command, ""), done.stdout)
    written = [*tmp_path.glob("outputs/**/result.json"), *tmp_path.glob("multirun/**/results.csv")]
    assert written, done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import sim; print(sim.__file__)"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(installed))
