"""Every error a user can see. Each message is one line: which key or file, what is wrong, what would work.

All of them survive pickling (Ray sends them between processes): arguments are plain strings.
"""


class RlhfError(Exception):
    """Base class of the errors that this project raises on purpose."""


class ConfigError(RlhfError, ValueError):
    """A configuration key is unknown, ill-typed, or incompatible with another."""


class DataError(RlhfError, ValueError):
    """A data file is missing, unreadable, or lacks a column."""


class RewardError(RlhfError, ValueError):
    """A reward function raised, or returned something that is not one number per completion."""


class AlgorithmError(RlhfError, ValueError):
    """The user's advantage estimator or loss raised, or returned something invalid."""


class PlacementError(RlhfError, RuntimeError):
    """The cluster cannot hold what the configuration asks for."""


class ClusterError(RlhfError, ConnectionError):
    """A Ray cluster's job server cannot be reached, refuses a job, or was lost while a job ran."""


class ActorError(RlhfError, RuntimeError):
    """An actor died or raised; the message names role, rank, node and what it was doing."""


class RoleLostError(ActorError):
    """An actor's process is gone: killed, out of memory, or on a node that left."""


class GpuMemoryError(RlhfError, MemoryError):
    """A learner or critic ran out of GPU memory; the message names role, rank, node and the keys to change."""


class DeadlineError(RlhfError, TimeoutError):
    """A wait outlasted its deadline; the message names role, rank, node, what it was doing, and the key to raise."""


class WeightSyncError(RlhfError, RuntimeError):
    """A weight version could not be committed on every worker that received it."""


class UnwrittenWeightsError(WeightSyncError):
    """vLLM's model has weights that no publish writes: it would sample from weights that are not trained."""


class SamplingError(RlhfError, RuntimeError):
    """The rollout workers' log-probabilities differ from the learner's: they do not sample the policy being trained."""


class NonFiniteError(RlhfError, FloatingPointError):
    """A loss, gradient, log-probability or advantage is NaN or infinite, and nothing was learnt from it."""


class CheckpointError(RlhfError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not match the run that asks for it."""


def one_line(error: BaseException) -> str:
    """The text of a foreign error on one line, to quote in a message of ours."""
    return " ".join(str(error).split()) or type(error).__name__


class EpisodeFailedError(RlhfError):
    """An environment raised."""
