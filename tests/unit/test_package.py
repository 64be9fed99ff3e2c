"""The package as others install it: a wheel, in a directory that is no checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.errors import ConfigError
from rlhf.recipes import find_recipe, load_config, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "conf", "rlhf", "actors", "jobs")


def test_recipes_have_names_and_files_of_that_name_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = shipped_recipes()
    assert {"grpo_smollm2", "ppo_tiny"} <= names.keys() and "base" not in names, "what others extend is no recipe"
    assert find_recipe("grpo_smollm2") == names["grpo_smollm2"]
    assert load_config(find_recipe("ppo_tiny"), []).name == "ppo_tiny"
    monkeypatch.chdir(tmp_path)
    Path("ppo_tiny").write_text("name: mine")
    assert find_recipe("ppo_tiny") == Path("ppo_tiny")
    for path in ("none.yaml", "conf/none"):
        assert find_recipe(path) == Path(path), "a path, whose error says that there is no such file"
    with pytest.raises(ConfigError, match=r"--config nothing: neither a file nor a recipe.* grpo_smollm2, "):
        find_recipe("nothing")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a wheel of this tree is installed."""
    tree, wheels, target = (tmp_path_factory.mktemp(name) for name in ("tree", "wheels", "target"))
    for name in SOURCES:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", str(tree), "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    subprocess.run(build, check=True, timeout=200)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=200)
    return target


def rlhf(installed: Path, directory: Path, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
    command = [sys.executable, "-P", "-m", "jobs.cli", *arguments]
    return subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.mark.long
def test_a_wheel_brings_its_recipes_along(installed: Path, tmp_path: Path) -> None:
    assert rlhf(installed, tmp_path, "--version").split() == ["rlhf", "0.1.0"]
    where = [sys.executable, "-P", "-c", "import rlhf.recipes as r; print(r.SHIPPED)"]
    env = os.environ | {"PYTHONPATH": str(installed)}
    shown = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    assert Path(shown.strip()) == installed / "rlhf" / "conf"
    assert "learner[0]" in rlhf(installed, tmp_path, "plan", "-c", "grpo_7b_2x8a100", "--device", "cpu")
    assert (installed / "jobs" / "report" / "page.css").is_file(), "what a report is made of"
    assert not list(tmp_path.iterdir()), "and leaves nothing"


def test_the_shell_completes_recipes() -> None:
    env = os.environ | {"_RLHF_COMPLETE": "complete_bash", "COMP_WORDS": "rlhf train -c grpo_sm", "COMP_CWORD": "3"}
    command = [sys.executable, "-c", "from jobs.cli import main; import sys; sys.argv[0] = 'rlhf'; main()"]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert found.stdout.split() == ["grpo_smollm2"], found.stderr
