"""The Ray actor of one environment worker."""

from actors.environments.episode_loop import EpisodeLoop, EpisodeReport, EpisodeTask
from actors.group import RankActor
from rlhf.config import Config
from rlhf.environments import EpisodeRunner
from rlhf.environments.turns import TurnReply
from rlhf.models.loading import load_tokenizer, stop_ids


class EnvironmentActor(RankActor):
    """The Ray actor around an EpisodeLoop. Threaded: ``collect`` waits while other calls come and go."""

    concurrent_calls = 8

    def __init__(self, config: Config) -> None:
        self._config = config

    def start(self) -> str:
        """Loads the tokenizer and the environment; returns the IP address of the worker's node. Raises ConfigError."""
        tokenizer = load_tokenizer(self._config.model)
        runner = EpisodeRunner(self._config, tokenizer, stop_ids=stop_ids(self._config.model))
        self._loop = EpisodeLoop(runner.run)
        return self.node()

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
