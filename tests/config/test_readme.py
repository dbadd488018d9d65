"""The README's promises: its commands run, from a wheel and from another folder."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```\n(.*?)^```$", re.M | re.S)


def commands() -> list[str]:
    """Every ``python -m`` command line of the README's fenced blocks, once."""
    found = []
    for block in FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        for line in block.splitlines():
            match = re.match(r"(?:pip install -e \. && )?(python -m .*)", line)
            if match and match[1] not in found:
                found.append(match[1])
    return found


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The wheel, unpacked: what a user has who never saw the repository."""
    folder = tmp_path_factory.mktemp("wheel")
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


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_command_runs_from_a_wheel(command, installed, tmp_path):
    env = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "100"}
    words = [sys.executable, *command.split()[1:]]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
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
