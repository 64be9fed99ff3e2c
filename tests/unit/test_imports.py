"""Imports point one way, lazy ones included; and what starts fast stays free of what starts slowly."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_import_contracts_hold() -> None:
    lint_imports = Path(sysconfig.get_path("scripts")) / "lint-imports"
    result = run(str(lint_imports), "--no-logo", "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("rlhf.late", "import ray"),
        ("rlhf.late", "from vllm import LLM"),
        ("rlhf.late", "import actors.rollouts.pool"),
        ("rlhf.late", "from jobs import cli"),
        ("actors.rollouts.late", "from vllm import LLM"),
        ("actors.rollouts.late", "from actors.rollouts.vllm_errors import ErrorOutput"),
        ("actors.rollouts.engine_loop", "import ray"),
        ("jobs.late", "import vllm"),
    ],
)
def test_a_lazy_import_breaks_the_contracts(tmp_path: Path, module: str, line: str) -> None:
    """Guards the guard: an import inside a function is seen, in packages laid out like ours."""
    result = lint_copy_with(tmp_path, module, line)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{module} ->" in result.stdout
    assert "BROKEN" in result.stdout


def test_modules_named_vllm_may_import_it(tmp_path: Path) -> None:
    result = lint_copy_with(tmp_path, "actors.rollouts.vllm_engine", "import vllm")
    assert result.returncode == 0, result.stdout + result.stderr


def lint_copy_with(directory: Path, module: str, line: str) -> subprocess.CompletedProcess[str]:
    """Lints empty copies of our modules, one of which (or a new one) has ``line`` in a function."""
    for package in ("rlhf", "actors", "jobs"):
        for path in (ROOT / package).rglob("*.py"):
            copy = directory / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
    (directory / "actors/weights/vllm_receiver.py").write_text("import vllm")  # a contract wants it in the graph
    (directory / f"{module.replace('.', '/')}.py").write_text(f"def late() -> None:\n    {line}  # noqa\n")
    # the linter puts its working directory first on the path, so it reads these packages instead of ours
    script = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; " + (
        f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=directory, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rlhf.config", ["torch", "numpy", "transformers", "ray"]),
        ("jobs.cli", ["torch", "transformers", "ray", "vllm"]),
        ("rlhf.planning.topology", ["torch", "ray"]),
        ("actors.rollouts.engine_loop", ["torch", "ray", "vllm"]),
        ("actors.rollouts.vllm_engine", ["vllm"]),
        ("rlhf.rewards.process", ["torch", "numpy", "transformers", "ray"]),
    ],
)
def test_fast_modules_import_nothing_heavy(module: str, heavy: list[str]) -> None:
    result = run(sys.executable, "-c", f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
