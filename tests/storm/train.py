"""`rlhf train` as a user runs it, but on StormEngine: python -m tests.storm.train train -c RECIPE KEY=VALUE ..."""

import actors.cluster
from jobs.cli import main
from tests.storm.engine import StormEngine

if __name__ == "__main__":
    actors.cluster.VllmEngine = StormEngine  # type: ignore[misc,assignment]
    main()
