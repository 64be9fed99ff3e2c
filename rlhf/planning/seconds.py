"""How long a training step will take: its phases' seconds from shapes, peaks and the efficiencies that were measured.

Every constant was fitted to rows of benchmarks/RESULTS.md (the section is named beside it), all of them of H200s of one
host with compiled learners. Other GPUs are assumed to reach the same shares of their own peaks, and learners over
several hosts to be linked like GPUs of one. tests/unit/test_seconds.py compares the predictions with measured steps.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rlhf.config import DEFAULT_KIND, Config, kind_key
from rlhf.packing import WORTH_SHARING, Span, prompt_spans
from rlhf.planning.costs import Peaks, decode_bytes, forward_flops, weight_bytes
from rlhf.planning.memory import kv_token_bytes
from rlhf.planning.memory_plan import MemoryPlan
from rlhf.planning.shapes import ModelShape
from rlhf.planning.usage import model_shape

# Share of the matrix rate that passes over packed tokens reach: MATRIX_SHARE * width / (width + HALF_WIDTH), so 0.45 at
# 0.5B ("The learner alone": 0.43-0.48), 0.57 at 1.5B ("ZeRO-3, compiled": 0.57), 0.72 at 7B (0.60 on two ranks with
# 4 of 28 layers recomputed), and no more than was measured beyond.
MATRIX_SHARE = 0.9
HALF_WIDTH = 896
MOST_MATRIX_SHARE = 0.72
# An update on several ranks against the same work per rank on one: 1.67 / 1.475 at 1.5B ("ZeRO-3, compiled"), 3.00 /
# 2.56 at 0.5B ("From 1 to 4 GPUs").
RANKS_FACTOR = 1.15
SHARED_FACTOR = 1.1  # time per FLOP where prompts are shared: 2.72 / 2.82 s for 821 / 948 TFLOP ("The learner alone")
UPDATE_FORWARDS = 3  # an update takes as long as that many forwards: the backward twice as long as its own
# The CPU work of an engine, per step and per token of a request in it: "The rollout engine alone", and the 7B engine of
# "7B with a reference on two GPUs", 9.7 ms per step of 256 requests of which reading memory takes 4.9.
ENGINE_STEP_S = 2.0e-3
ENGINE_TOKEN_S = 14e-6
USEFUL_ENGINES = 2  # on one GPU: a third hides no more of the others' CPU work (the same section, 1.5B)
LOGPROBS_SPEED = 0.96  # of sampling with log-probabilities: "The rollout engine alone", 7B
GENERATE_S = 0.3  # beyond the engines' own time, to wake them and to hand in the last groups: 5.03 - 4.43 s at 1.5B
PUBLISH_S = 0.1  # of calls, checksums and waking engines: "A whole step, colocated"
LINK_SHARE = 0.58  # of the link's rate that a publish reaches: "A weight publish of 7B", 260 of 450 GB/s


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of each phase of a step; 0 where the run has none."""

    generate: float
    reference: float
    reward: float  # of a reward model; functions are not known
    score: float  # the policy's own log-probabilities, and the critic's values
    update: float
    publish: float
    asynchronous: bool  # generating goes on during everything else

    @property
    def phases(self) -> dict[str, float]:
        """The seconds by phase."""
        return {name: seconds for name, seconds in asdict(self).items() if name != "asynchronous"}

    @property
    def total(self) -> float:
        """Of the step: the longer of generating and the rest where they run at once, else their sum."""
        rest = sum(self.phases.values()) - self.generate
        return max(self.generate, rest) if self.asynchronous else self.generate + rest


def predict_step(
    config: Config, plan: MemoryPlan, peaks: Peaks, *, prompt_tokens: int, completion_lengths: Sequence[int]
) -> StepSeconds:
    """A step on GPUs with ``peaks``, whose memory ``plan`` has decided on recomputation.

    All prompts have ``prompt_tokens``; ``completion_lengths`` [S] in the order of the groups. Reference and reward
    model are taken to start when sampling has ended, which is so if all completions have the same length.
    """
    work = _Work.of(config, prompt_tokens, completion_lengths)
    policy, algorithm = model_shape(config), config.algorithm
    settings = {"learner": (config.learner, policy, work.num_completion_tokens)}
    if config.uses_critic:
        settings["critic"] = (config.critic, model_shape(config, config.critic.path), 0)
    scoring, updates = {}, {}
    for role, (learner, shape, head_tokens) in settings.items():
        forward = work.forward_s(shape, head_tokens, learner.num_ranks, peaks)
        scores = role == "critic" or algorithm.facts.critic or (algorithm.facts.kl == "reward" and algorithm.beta > 0)
        scoring[role] = forward if scores else 0.0
        scoring[role] += forward if role == "learner" and config.base_is_reference else 0.0
        checkpointing = plan.checkpointing[role]
        again = checkpointing.layers / checkpointing.num_layers  # of a forward
        between_ranks = RANKS_FACTOR if learner.num_ranks > 1 else 1.0
        updates[role] = between_ranks * algorithm.num_epochs * (UPDATE_FORWARDS + again) * forward
    # policy and critic work at the same time: on the same GPUs each gets a part of them; in one process, its turn
    together = sum if config.placement.colocated or config.critic_on_base else max
    reference, reward = 0.0, 0.0
    if config.uses_reference:
        shape = model_shape(config, config.reference.path)
        reference = work.forward_s(shape, work.num_completion_tokens, config.reference.num_ranks, peaks)
    if config.reward.model is not None:
        shape = model_shape(config, config.reward.model.path)
        reward = work.forward_s(shape, 0, config.reward.model.num_ranks, peaks)
    return StepSeconds(
        generate=_generate_s(config, policy, work, peaks, at_once=_at_once(config, plan, policy, work)),
        reference=reference,
        reward=reward,
        score=together(scoring.values()),
        update=together(updates.values()),
        publish=PUBLISH_S + weight_bytes(policy) / (LINK_SHARE * peaks.link_bytes_per_s),
        asynchronous=config.rollout.max_staleness > 0,
    )


def matrix_share(shape: ModelShape) -> float:
    """Share of a device's matrix rate that passes over many tokens reach: wider models more."""
    return min(MOST_MATRIX_SHARE, MATRIX_SHARE * shape.hidden_size / (shape.hidden_size + HALF_WIDTH))


@dataclass(frozen=True)
class _Work:
    """What a step computes."""

    prompt_tokens: int
    num_prompts: int
    completion_lengths: Sequence[int]
    shares_prompts: bool  # as learner, critic and reference decide it

    @property
    def spans(self) -> list[Span]:
        """Of all packed sequences."""
        size, lengths = len(self.completion_lengths) // self.num_prompts, self.completion_lengths
        size = size if self.shares_prompts else 1
        groups = (lengths[start : start + size] for start in range(0, len(lengths), size))
        return [span for group in groups for span in prompt_spans(self.prompt_tokens, group)]

    @classmethod
    def of(cls, config: Config, prompt_tokens: int, lengths: Sequence[int]) -> "_Work":
        group = config.algorithm.group_size
        num_prompts = len(lengths) // group
        repeated = num_prompts * (group - 1) * prompt_tokens
        shares = repeated > WORTH_SHARING * (len(lengths) * prompt_tokens + sum(lengths))
        return cls(prompt_tokens, num_prompts, lengths, shares)

    @property
    def num_completion_tokens(self) -> int:
        return sum(self.completion_lengths)

    def forward_s(self, shape: ModelShape, head_tokens: int, num_gpus: int, peaks: Peaks) -> float:
        """Seconds of one forward over everything on ``num_gpus``; the LM head on ``head_tokens``."""
        slower = SHARED_FACTOR if self.shares_prompts else 1.0
        return slower * forward_flops(shape, self.spans, head_tokens) / (num_gpus * peaks.flops * matrix_share(shape))


def _at_once(config: Config, plan: MemoryPlan, shape: ModelShape, work: _Work) -> int:
    """Requests that an engine runs at once: as many as are permitted, and as its cache holds at their mean length."""
    rollout = config.rollout
    cached = plan.roles[kind_key(DEFAULT_KIND)].kv_cache / kv_token_bytes(shape, rollout.tensor_parallel_size)
    mean_length = work.prompt_tokens + work.num_completion_tokens / len(work.completion_lengths)
    return max(1, min(rollout.max_num_seqs, int(cached / mean_length)))


def _generate_s(config: Config, shape: ModelShape, work: _Work, peaks: Peaks, *, at_once: int) -> float:
    """Prefill of each prompt once, reading weights and caches, and the engines' CPU work, of which engines that share a
    GPU hide each other's. None of the three hides another: an engine's CPU waits for its GPU in every step."""
    rollout, lengths = config.rollout, work.completion_lengths
    engines = config.rollout_workers_per_gpu
    num_gpus = rollout.num_workers * rollout.tensor_parallel_size / engines
    side_by_side = rollout.num_workers * min(engines, USEFUL_ENGINES) / engines
    tokens = work.num_completion_tokens / side_by_side  # of each
    num_steps = max(tokens / min(at_once, len(lengths) / side_by_side), max(lengths))
    read = decode_bytes(shape, lengths, num_workers=rollout.num_workers, max_num_seqs=at_once)
    prefill = forward_flops(shape, [(work.prompt_tokens, work.prompt_tokens)] * work.num_prompts, work.num_prompts)
    seconds = (
        prefill / (num_gpus * peaks.flops * matrix_share(shape))
        + read / (num_gpus * peaks.bytes_per_s)
        + num_steps * ENGINE_STEP_S
        + tokens * ENGINE_TOKEN_S
    )
    return GENERATE_S + seconds / (LOGPROBS_SPEED if config.needs_rollout_logprobs else 1.0)
