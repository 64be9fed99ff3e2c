"""Lets mutmut make faults in the modules of generated.toml and counts those that their tests notice.

python -m tests.mutants.generated [PART-OF-A-MODULE'S-PATH ...]     # make mutants; several faults a second

judged.toml lists survivors that need no test. Left alone are the expressions of ``raise`` and ``assert`` (messages and
our own invariants) and, by mutmut itself, decorated functions (properties among them) and what runs on import.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import orig_function_and_class_names_from_key

from tests.mutants.tree import copy_tree

LISTS = Path(__file__).parent
LEAST_NOTICED = 0.85  # share of a module's faults, less the equivalent ones
LEFT_ALONE = [r"^\s*(raise|assert)\b"]
SURVIVED = {"survived", "no tests"}  # the other results, a hang or a crash among them, are seen in a test run
UNCERTAIN = {"timeout"}  # on a busy machine, an equivalent fault may run out of time
SETTINGS = """
[tool.mutmut]
source_paths = [{module}]
also_copy = {copied}
do_not_mutate_patterns = {left_alone}
# unraisableexception collects all garbage ten times in each run, which takes three quarters of its time
pytest_add_cli_args = [
    "-p", "no:cacheprovider", "-p", "no:unraisableexception",
    "--hypothesis-seed=0", "--hypothesis-profile=few examples",
]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "forkserver" # a fork of a process that has run autograd cannot run it
"""


@dataclass(frozen=True)
class Fault:
    """In ``function``, the lines ``old`` became ``new``; both without indentation, joined by a space."""

    file: str
    function: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}, {self.function}\n    - {self.old}\n    + {self.new}"


@dataclass(frozen=True)
class Judged:
    """Survivors known: ``equivalent`` ones change nothing that could be seen; ``accepted`` are not worth a test."""

    equivalent: frozenset[Fault]
    accepted: frozenset[Fault]

    @classmethod
    def load(cls) -> "Judged":
        tables = tomllib.loads((LISTS / "judged.toml").read_text())
        return cls(_faults(tables["equivalent"]), _faults(tables["accepted"]))


def _faults(entries: list[dict[str, Any]]) -> frozenset[Fault]:
    assert all(entry["reason"] for entry in entries)
    return frozenset(
        Fault(entry["file"], entry["function"], entry["old"], new) for entry in entries for new in entry["new"]
    )


def faults_of(module: str, tests: list[str]) -> Iterator[tuple[Fault | None, str]]:
    """The result of each of mutmut's faults in a module, with the fault itself unless it was noticed for certain: to
    find its lines takes seconds. Exits if mutmut could not run."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, chdir(directory):
        copy_tree(Path())
        copied = [path.name for path in Path().iterdir()]
        with Path("pyproject.toml").open("a") as config:
            lists = {"module": module, "copied": copied, "left_alone": LEFT_ALONE, "tests": tests}
            config.write(SETTINGS.format(**{key: json.dumps(value) for key, value in lists.items()}))
        command = [sys.executable, "-B", "-m", "mutmut", "run", "--max-children", "1"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            sys.exit(f"{run.stdout}\nmutmut ended with {run.returncode} for {module}")
        data = SourceFileMutationData(path=module)
        data.load()
        for name, code in data.exit_code_by_key.items():
            assert code is not None, f"{name} was not run"
            result = status_by_exit_code[code]
            yield _fault(module, name) if result in SURVIVED | UNCERTAIN else None, result


def _fault(module: str, name: str) -> Fault:
    function, owner = orig_function_and_class_names_from_key(name)
    changed = get_diff_for_mutant(name, path=module).splitlines()[3:]  # less the two files' names and the first @@
    old, new = (" ".join(line[1:].strip() for line in changed if line.startswith(sign)) for sign in "-+")
    return Fault(module, f"{owner}.{function}" if owner else function, old, new)


@dataclass
class Count:
    noticed: int = 0
    survived: int = 0

    @property
    def share(self) -> float:
        return self.noticed / max(self.noticed + self.survived, 1)

    def __str__(self) -> str:
        return f"{self.noticed} noticed, {self.survived} survived: {100 * self.share:.0f} %"


def main() -> None:
    modules = tomllib.loads((LISTS / "generated.toml").read_text())
    chosen = [name for name in modules if len(sys.argv) == 1 or any(part in name for part in sys.argv[1:])]
    judged, total, failed = Judged.load(), Count(), False
    for module in chosen:
        count = Count()
        unused: set[Fault | None] = {f for f in judged.equivalent | judged.accepted if f.file == module}
        for fault, result in faults_of(module, modules[module]):
            unused.discard(fault)
            if result not in SURVIVED:
                count.noticed += 1
            elif fault not in judged.equivalent:
                count.survived += 1
                if fault not in judged.accepted:
                    print(f"survived: {fault}")
        for fault in unused:
            print(f"stale: judged.toml has a fault that did not survive: {fault}")
        print(f"{module}: {count}", flush=True)
        total = Count(total.noticed + count.noticed, total.survived + count.survived)
        failed |= bool(unused) or count.share < LEAST_NOTICED
    print(f"all: {total}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
