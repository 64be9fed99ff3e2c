"""Makes each fault of tests/mutants/*.toml in a copy of the tree and runs the test that must notice it.

python -m tests.mutants [PART-OF-A-NAME ...]     # make mutants; a few seconds for each
"""

import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.tree import copy_tree

TEST_S = 600.0  # for the tests of one fault; a test that hangs has noticed


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
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
    try:
        code = subprocess.run(command, cwd=tree, capture_output=True, timeout=TEST_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return "noticed"
    finally:
        path.write_text(source)
    return {0: "survived", 1: "noticed"}.get(code, f"stale: pytest ended with {code} for {mutant.tests}")


def main() -> None:
    mutants = load(sys.argv[1:])
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
