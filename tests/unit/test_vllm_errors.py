"""The root cause of an engine that did not start, out of what vLLM's processes print (0.25 to 0.32)."""

import sys

import pytest

from actors.rollouts.vllm_errors import ErrorOutput, root_cause

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
OUTPUT = f"""\
Traceback (most recent call last):
(Worker_TP1 pid=7) ERROR 11-22 14:00:01 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker_TP1 pid=7) ERROR 11-22 14:00:01 [multiproc_executor.py:953] KeyError: 'a first one, which the next follows from'
(Worker_TP1 pid=7) ERROR 11-22 14:00:01 [multiproc_executor.py:953] {OUT_OF_MEMORY}
(Worker_TP0 pid=6) ERROR 11-22 14:00:02 [multiproc_executor.py:953] RuntimeError: connection closed by peer
(EngineCore pid=5) ERROR 11-22 14:00:03 [core.py:1100] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
"""


def test_the_first_process_to_fail_says_why() -> None:
    assert root_cause(OUTPUT) == OUT_OF_MEMORY
    assert root_cause("ValueError: of the engine's own process\n") == "ValueError: of the engine's own process"
    assert root_cause("INFO all is well: see https://example.org\nnothing failed") is None


def test_vllms_pointer_is_replaced_by_what_it_points_to(capfd: pytest.CaptureFixture[str]) -> None:
    pointer = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    print("ValueError: from before", file=sys.stderr, flush=True)
    output = ErrorOutput()
    print(OUTPUT, file=sys.stderr, flush=True)
    assert str(output.explain(pointer)) == f"vLLM did not start: {OUT_OF_MEMORY}"
    plain = ValueError("max_model_len is too large")
    assert str(output.explain(plain)) == "vLLM did not start: ValueError: max_model_len is too large"
