"""Makes each fault of tests/mutants/*.toml in a copy of the tree and runs the test that must notice it.

python -m tests.mutants [PART-OF-A-NAME ...]     # make mutants; a second or two for each

Each test runs in a fork of this process, which has imported the libraries but nothing of the tree.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.tree import ROOT, copy_tree

TEST_S = 600.0  # for the tests of one fault; a test that hangs has noticed
LIBRARIES = ("torch", "transformers", "deepspeed", "ray", "hypothesis", "typer", "rich", "omegaconf")


@dataclass(frozen=True)
class Mutant:
    """One fault: ``old``, which occurs once in ``file``, becomes ``new``, and ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def load(parts: list[str]) -> list[Mutant]:
    """The mutants whose name holds one of ``parts``; all without any."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    mutants = [Mutant(**table) for file in files for table in tomllib.loads(file.read_text()).get("mutant", [])]
    return [mutant for mutant in mutants if not parts or any(part in mutant.name for part in parts)]


def verdict(mutant: Mutant, tree: Path) -> str:
    """'noticed', 'survived', or what is wrong with the mutant itself."""
    path = tree / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return f"stale: its text occurs {source.count(mutant.old)} times in {mutant.file}"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        code = run_tests(mutant.tests, tree)
    finally:
        path.write_text(source)
    if code is None:
        return "noticed"
    return {0: "survived", 1: "noticed"}.get(code, f"stale: pytest ended with {code} for {mutant.tests}")


def run_tests(tests: str, tree: Path) -> int | None:
    """pytest's exit code for ``tests`` in ``tree``; None if they hang. What they leave behind is ended with them."""
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(tests, tree))
    process.start()
    assert process.ident is not None
    process.join(TEST_S)
    with contextlib.suppress(ProcessLookupError):  # its group ends with its last process
        os.killpg(process.ident, signal.SIGKILL)
    process.join()
    return process.exitcode if process.exitcode is not None and process.exitcode >= 0 else None


def _run_tests(tests: str, tree: Path) -> None:
    import pytest

    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    sys.path = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(tree)  # for the processes that tests start
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests.split()])
    os._exit(int(code))


def main() -> None:
    mutants = load(sys.argv[1:])
    for name in LIBRARIES:
        importlib.import_module(name)
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy_tree(Path(directory))
        for mutant in mutants:
            verdicts.append(verdict(mutant, Path(directory)))
            print(f"{verdicts[-1]:8}  {mutant.name}", flush=True)
    noticed = verdicts.count("noticed")
    print(f"{noticed} of {len(verdicts)} faults noticed")
    sys.exit(noticed != len(verdicts))


if __name__ == "__main__":
    main()
