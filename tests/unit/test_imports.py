"""Imports point one way, lazy ones included; and what starts fast stays free of what starts slowly."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("algorithms", "data", "models", "planning", "rewards", "training")
PACKAGES = ("rlhf", "actors", "jobs", "actors/rollouts", *(f"rlhf/{room}" for room in ROOMS))  # of the contracts


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_import_contracts_hold() -> None:
    lint_imports = Path(sysconfig.get_path("scripts")) / "lint-imports"
    result = run(str(lint_imports), "--no-logo", "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "line", ["import ray", "from vllm import LLM", "import actors.rollouts.pool", "from jobs import cli"]
)
def test_a_lazy_import_breaks_the_contracts(tmp_path: Path, line: str) -> None:
    """Guards the guard: an import inside a function of rlhf is seen, in a package laid out as ours is."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for module in ("autoscale", "pool", "scheduler"):
        (tmp_path / "actors" / "rollouts" / f"{module}.py").touch()
    (tmp_path / "jobs" / "cli.py").touch()
    (tmp_path / "rlhf" / "late.py").write_text(f"def late() -> None:\n    {line}  # noqa\n")
    # the linter puts its working directory first on the path, so it reads these packages instead of ours
    script = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; " + (
        f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "rlhf.late ->" in result.stdout
    assert "BROKEN" in result.stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rlhf.config", ["torch", "numpy", "transformers", "ray"]),
        ("jobs.cli", ["torch", "transformers", "ray", "vllm"]),
        ("rlhf.planning.fit", ["torch", "transformers", "ray"]),
        ("rlhf.planning.topology", ["torch", "ray"]),
        ("rlhf.rewards.process", ["torch", "numpy", "transformers", "ray"]),
    ],
)
def test_fast_modules_import_nothing_heavy(module: str, heavy: list[str]) -> None:
    result = run(sys.executable, "-c", f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
