"""A number game: the model guesses, and is told whether to go higher or lower. Its data are ``task:guess``."""

from typing import TYPE_CHECKING

from rlhf.rewards.functions import last_number

if TYPE_CHECKING:
    from rlhf.environments.chat import Chat

MISSED = -0.05  # a guess that was wrong
SAID_NONE = -0.1  # a reply without a number
CUT = -0.1  # a reply that did not end


async def guess(chat: "Chat", secret: int, num_guesses: int) -> float:
    """1 for the number; every reply before it costs a little, one that is not a guess more."""
    hint = None
    for _ in range(num_guesses):
        reply = await chat(hint)
        number = last_number(reply.text)
        if reply.truncated:
            chat.reward(CUT)
        if number == secret:
            return 1.0
        chat.reward(SAID_NONE if number is None else MISSED)
        hint = "Say a number." if number is None else "Higher." if number < secret else "Lower."
    return 0.0
