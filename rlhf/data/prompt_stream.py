"""A set's prompts in an order set by the seed, epoch after epoch, resumable at any position."""

from random import Random
from typing import Any

from rlhf.batch import Prompt
from rlhf.data.prompts import PromptSet
from rlhf.errors import CheckpointError


class PromptStream:
    """An endless stream of prompts, each epoch in its own order, set by seed and epoch.

    A prompt's id is its position in the stream: epoch x len(prompts) + its place in the epoch. So ids are unique over a
    run, and a resumed stream continues with the ids that an uninterrupted one would have given.
    """

    def __init__(self, prompts: PromptSet, *, shuffle: bool, seed: int) -> None:
        assert len(prompts), "load_prompts never returns an empty set"
        self.prompts = prompts
        self.shuffle = shuffle
        self.seed = seed
        self.position = 0  # prompts taken so far
        self._fingerprint = prompts.fingerprint()
        self._epoch, self._order = 0, self._order_of(0)

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        return [self._next() for _ in range(n)]

    def at(self, position: int) -> Prompt:
        """The prompt with the id ``position``, whether taken or not."""
        epoch, place = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return self.prompts.prompt(self._order[place], id=position)

    def _next(self) -> Prompt:
        prompt = self.at(self.position)
        self.position += 1
        return prompt

    def _order_of(self, epoch: int) -> list[int]:
        """The row at each place of an epoch."""
        order = list(range(len(self.prompts)))
        if self.shuffle:
            Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it refers to; JSON types."""
        return {"position": self.position, "source": self.prompts.source, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self.prompts),
            "fingerprint": self._fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes where ``state`` was taken. Raises CheckpointError if the data or its order have changed."""
        for key, ours in self._identity().items():
            if state.get(key) != ours:
                raise CheckpointError(
                    f"the checkpoint's data position does not fit data.train={self.prompts.source}: {key} was "
                    f"{state.get(key)} (of {state.get('source')}) and is now {ours}; resume with the data, prompt "
                    "settings and seed of that run, or start over with checkpoint.resume=none"
                )
        self.position = int(state["position"])
