"""Who has asked a run to stop is not surprised by a restart."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.runs import stops_at_step_end
from rlhf.errors import RoleLostError


def test_the_first_signal_is_a_request_and_the_second_stops() -> None:
    loop: Any = SimpleNamespace(stop_requested=False)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stops_at_step_end(loop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert loop.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("stop_requested", "expected"), [(False, RoleLostError), (True, KeyboardInterrupt)])
def test_a_loss_after_a_request_ends_the_run(stop_requested: bool, expected: type[BaseException]) -> None:
    loop: Any = SimpleNamespace(stop_requested=stop_requested)
    with pytest.raises(expected), stops_at_step_end(loop):
        raise RoleLostError("learner[0] died")
