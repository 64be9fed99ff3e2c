"""A run's prompts in an order set by the seed, epoch after epoch, resumable at any position."""

from typing import Any

from rlhf.batch import Prompt
from rlhf.data.mixture import Mixture, Schedule
from rlhf.data.prompts import PromptSet
from rlhf.errors import CheckpointError


class PromptStream:
    """An endless stream of prompts of one set, or of several in proportion to their weights (``Schedule``).

    Each set has epochs of its own, each in its own order (``Mixture.order``). A prompt's id is its position in the
    stream; with one set that is epoch x len(prompts) + its place in the epoch. So ids are unique over a run, and a
    resumed stream continues with the ids that an uninterrupted one would have given.
    """

    def __init__(self, prompts: PromptSet | Mixture, *, shuffle: bool, seed: int) -> None:
        self.prompts = Mixture.of_one(prompts) if isinstance(prompts, PromptSet) else prompts
        assert all(map(len, self.prompts.sets.values())), "load_prompts never returns an empty set"
        self.shuffle = shuffle
        self.seed = seed
        self.position = 0  # prompts taken so far
        self._names = list(self.prompts.sets)
        self._schedule = Schedule(list(self.prompts.weights.values()))
        self._fingerprint = self.prompts.fingerprint()
        self._orders: dict[str, tuple[int, list[int]]] = {}  # of each set the epoch in progress, and its order

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        return [self._next() for _ in range(n)]

    def at(self, position: int) -> Prompt:
        """The prompt with the id ``position``, whether taken or not."""
        source, drawn = self._schedule.at(position)
        name = self._names[source]
        prompts = self.prompts.sets[name]
        epoch, place = divmod(drawn, len(prompts))
        if name not in self._orders or self._orders[name][0] != epoch:
            self._orders[name] = epoch, self.prompts.order(name, epoch, shuffle=self.shuffle, seed=self.seed)
        return prompts.prompt(self._orders[name][1][place], id=position)

    def _next(self) -> Prompt:
        prompt = self.at(self.position)
        self.position += 1
        return prompt

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
                    f"the checkpoint's data position does not fit {self.prompts}: {key} was "
                    f"{state.get(key)} (of {state.get('source')}) and is now {ours}; resume with the data, prompt "
                    "settings and seed of that run, or start over with checkpoint.resume=none"
                )
        self.position = int(state["position"])
