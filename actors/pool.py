"""The rollout pool: spreads prompts over the vLLM workers and streams finished groups back."""

import time
from collections.abc import Iterator, Sequence

import ray

from actors.group import ActorGroup, Deadline, Member, fetch
from actors.rollout import Request
from actors.weight_sync import Transport, publish
from rlhf.batch import Prompt, Rollout
from rlhf.config import TimeoutConfig
from rlhf.errors import DeadlineError

COLLECT_WAIT_S = 5.0  # how long a worker holds an empty-handed collect call; only an upper bound on a round trip


class RolloutPool:
    """A fixed set of workers on one weight version."""

    def __init__(self, workers: ActorGroup, transport: Transport, timeouts: TimeoutConfig, *, asleep: bool) -> None:
        """``asleep``: the workers share their GPUs, and sleep now as they will whenever the learner works."""
        self._workers, self._transport, self._timeouts = workers, transport, timeouts
        self._can_sleep = self._asleep = asleep
        # One long-polling call per worker, always in flight once generating has begun: a completion that is handed to a
        # call nobody waits for would be lost.
        self._collecting: dict[ray.ObjectRef, Member] = {}

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, greedy: bool = False) -> Iterator[list[Rollout]]:
        """Yields each prompt's group as its last completion finishes. Raises DeadlineError at timeouts.generate_s."""
        assert not self._asleep, "a sleeping pool cannot sample; publish wakes it"
        deadline = Deadline(self._timeouts.generate_s, "timeouts.generate_s")
        self._submit(prompts, group_size, greedy, deadline)
        expected = {p.id for p in prompts}
        groups: dict[int, list[Rollout]] = {}
        for rollout in self._stream(len(prompts) * group_size, deadline):
            group = groups.setdefault(rollout.prompt.id, [])
            group.append(rollout)
            if len(group) == group_size:
                assert rollout.prompt.id in expected, f"prompt {rollout.prompt.id} came back twice"
                expected.remove(rollout.prompt.id)
                yield sorted(groups.pop(rollout.prompt.id), key=lambda r: r.sample_index)

    def _submit(self, prompts: Sequence[Prompt], group_size: int, greedy: bool, deadline: Deadline) -> None:
        """A group goes whole to the worker with the fewest tokens to do, so that it shares its prompt's cache."""
        shares: list[list[Request]] = [[] for _ in self._workers.members]
        tokens = [0] * len(shares)
        for prompt in sorted(prompts, key=lambda p: -len(p.token_ids)):
            worker = min(range(len(shares)), key=lambda w: (tokens[w], w))
            shares[worker] += [Request(prompt, i, greedy) for i in range(group_size)]
            tokens[worker] += group_size * max(1, len(prompt.token_ids))
        self._workers.call_each("submit", [(share,) for share in shares], deadline=deadline, doing="queueing").result()

    def _stream(self, count: int, deadline: Deadline) -> Iterator[Rollout]:
        """Completions as they finish, ``count`` in all."""
        ends = time.monotonic() + deadline.seconds
        if not self._collecting:
            self._collecting = {self._collect(member): member for member in self._workers.members}
        while count:
            left = ends - time.monotonic()
            ready, _ = ray.wait(list(self._collecting), num_returns=1, timeout=max(0.0, left))
            if not ready or left <= 0:
                raise DeadlineError(
                    f"rollout pool: {count} completion(s) unfinished after {deadline.seconds:g} s; raise "
                    f"{deadline.key}, or lower rollout.max_completion_tokens or algorithm.prompts_per_step"
                )
            member = self._collecting.pop(ready[0])
            finished = fetch(ready[0], member, "generating")
            self._collecting[self._collect(member)] = member
            for rollout in finished:
                count -= 1
                yield rollout

    def _collect(self, member: Member) -> ray.ObjectRef:
        return member.handle.collect.remote(COLLECT_WAIT_S)

    def publish(self, version: int) -> dict[str, float]:
        """Wakes the workers if they sleep, and commits the learner's weights as ``version`` on all of them."""
        started = time.monotonic()
        deadline = Deadline(self._timeouts.publish_s, "timeouts.publish_s")
        if self._asleep:
            self._workers.call("wake", deadline=deadline, doing="waking up").result()
            self._asleep = False
        publish(version, self._transport, self._workers, deadline)
        return {"weight_sync/publish_s": time.monotonic() - started, "weight_sync/version": float(version)}

    def sleep(self) -> None:
        """Workers that share their GPU with the learner give its memory back until the next ``publish``."""
        if self._can_sleep and not self._asleep:
            deadline = Deadline(self._timeouts.publish_s, "timeouts.publish_s")
            self._workers.call("sleep", deadline=deadline, doing="going to sleep").result()
            self._asleep = True
