"""The Ray actor of one environment worker."""

import functools

from actors.environments.episode_loop import EpisodeLoop, EpisodeReport, EpisodeTask
from actors.group import RankActor
from rlhf.config import Config
from rlhf.environments.turns import TurnReply


class EnvironmentActor(RankActor):
    """The Ray actor around an EpisodeLoop. Threaded: ``collect`` waits while other calls come and go."""

    concurrent_calls = 8

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> str:
        """Loads the tokenizer and the environment; returns the IP address of the worker's node. Raises ConfigError."""
        raise AssertionError  # written once run_episode is there

    def open(self, tasks: list[EpisodeTask]) -> None:
        """Begins episodes."""
        self._loop.open(tasks)

    def answer(self, replies: list[tuple[str, TurnReply]]) -> None:
        """Brings the replies that episodes wait for."""
        self._loop.answer(replies)

    def drop(self, keys: list[str]) -> None:
        """Ends episodes that nobody wants any more."""
        self._loop.drop(keys)

    def collect(self, wait_s: float) -> EpisodeReport:
        """Waits up to ``wait_s`` for something to report, then returns all there is."""
        return self._loop.collect(wait_s)
