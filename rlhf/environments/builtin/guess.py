"""A number game: the model guesses, and is told whether to go higher or lower. Its data are ``task:guess``."""

from typing import TYPE_CHECKING

from rlhf.rewards.functions import last_number

if TYPE_CHECKING:
    from rlhf.environments.chat import Chat

NUMBER = 0.1  # for a reply that has a number at all
MISSED = -0.05


async def guess(chat: "Chat", secret: int, num_guesses: int) -> float:
    """1 for the number; every turn before it costs a little, one without a number a little more."""
    hint = None
    for _ in range(num_guesses):
        number = last_number((await chat(hint)).text)
        if number == secret:
            return 1.0
        chat.reward(MISSED if number is None else MISSED + NUMBER)
        hint = "Say a number." if number is None else "Higher." if number < secret else "Lower."
    return 0.0
