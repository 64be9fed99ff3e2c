"""Python code that a completion contains, run against tests."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlhf.isolated import run_python
from rlhf.rewards.functions import Completion, Values, completion_text

FENCE = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python_tests(
    completions: Sequence[Completion],
    tests: Sequence[str | list[str] | None],
    timeout_s: float = 5.0,
    memory_mib: int = 1024,
    num_parallel: int = 8,
) -> Values:
    """1 where the last fenced Python block of the completion passes all its ``tests``, else 0; without a block 0.

    ``tests``: a column with Python source, or a list of such, that uses what the code defines and raises if it is
    wrong: ``assert add(1, 2) == 3``. None abstains. Code and tests run in one new process per completion, bounded by
    ``timeout_s`` and ``memory_mib``; what that isolates, and what not: ``rlhf.isolated.run_python``. At most
    ``num_parallel`` run at once: the group needs up to ceil(group_size / num_parallel) x ``timeout_s``, which must be
    below ``reward.function_timeout_s``.
    """
    if timeout_s <= 0 or memory_mib < 1 or num_parallel < 1:
        raise ValueError("timeout_s, memory_mib and num_parallel must be positive")

    def value(completion: Completion, given: str | list[str] | None) -> float | None:
        if given is None:
            return None
        blocks = FENCE.findall(completion_text(completion))
        wanted = [given] if isinstance(given, str) else given
        if not wanted:
            raise ValueError("tests is an empty list, which anything would pass; use null where there are none")
        if not blocks:
            return 0.0
        outcome = run_python([blocks[-1], *wanted], timeout_s=timeout_s, memory_bytes=memory_mib * 2**20)
        return float(outcome.completed)

    with ThreadPoolExecutor(num_parallel) as threads:
        return list(threads.map(value, completions, tests))
