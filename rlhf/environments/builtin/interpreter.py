"""Questions that a short program answers. Its data are ``task:python``."""

from typing import TYPE_CHECKING

from rlhf.isolated import run_python
from rlhf.rewards.functions import last_number

if TYPE_CHECKING:
    from rlhf.environments.chat import Chat

TIMEOUT_S = 10.0
MEMORY_BYTES = 2**30
MAX_PRINTED_BYTES = 2000


def python(code: str) -> str:
    """Runs a Python program and returns what it prints. Every program starts afresh: print all that you need."""
    outcome = run_python(
        [code], timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES, max_printed_bytes=MAX_PRINTED_BYTES + 1
    )
    printed = outcome.printed[:MAX_PRINTED_BYTES]
    if len(outcome.printed) > MAX_PRINTED_BYTES:
        printed += "\n... and more"
    if not outcome.in_time:
        return f"{printed}\nThe program was ended after {TIMEOUT_S:g} s.".lstrip()
    return printed or "The program printed nothing."


async def compute(chat: "Chat", answer: str) -> float:
    """1 if the last number of the model's answer is the result."""
    reply = await chat()
    return float(last_number(reply.text) == last_number(answer))
