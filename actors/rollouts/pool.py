"""The rollout pool: an elastic set of workers behind one stream of groups.

The rules are in ``scheduler``, the processes in ``supervisor``. Here one thread listens to all workers; it and the
driver's calls take turns under one lock. Only ``publish``, and bringing new workers up to date while the driver waits
for groups, involve the learner, which is idle at both times.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors import stacks
from actors.control import RunControl, no_room
from actors.environments.crew import Crew, Turn
from actors.group import ActorGroup, Deadline, Member, wait_for_some
from actors.rollouts.autoscale import Autoscaler, LoadMeter
from actors.rollouts.engine import Completion, Request, request_key
from actors.rollouts.factory import WorkerFactory
from actors.rollouts.scheduler import State, Worker
from actors.rollouts.supervisor import Supervisor
from actors.weights.publish import Transport, publish
from rlhf.batch import Prompt, Rollout
from rlhf.config import DEFAULT_KIND, Config
from rlhf.errors import DeadlineError, RlhfError, UnwrittenWeightsError

LISTEN_S = 0.2  # the longest that the listening thread waits for a worker to answer
# Asking Ray about a call, and looking at a worker, cost some microseconds each: a large pool does so less often.
LINGER_S = 1e-4  # for each call in flight: how long more answers may take to be heard together with the first
LOOK_S = 5e-4  # for each worker: the time between two looks at all of them
OPEN_PER_SAMPLE = 2  # episodes for each completion that workers can sample at once: while one acts, another samples


@dataclass
class GroupInProgress:
    """A submitted group and the completions that have come back. Workers get ids and tokens, never the whole prompt."""

    prompt: Prompt
    size: int
    greedy: bool
    logprobs: bool
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    def request(self, group_id: int, sample: int) -> Request:
        """The request to a worker for one of its completions."""
        key, prompt = request_key(group_id, sample), self.prompt
        return Request(key, prompt.id, prompt.token_ids, sample, self.greedy, self.logprobs)

    def add(self, sample: int, done: Completion) -> None:
        """Adds a completion that came back."""
        self.rollouts[sample] = Rollout(
            self.prompt, sample, done.token_ids, done.versions, done.finish_reason, done.logprobs
        )


class RolloutPool:
    """Implements ``rlhf.roles.Rollouts``, and ``Turns`` for the episodes of an environment."""

    def __init__(
        self,
        config: Config,
        factory: WorkerFactory,
        control: RunControl,
        *,
        shares_gpus: bool,
        note: Callable[[str], None],
    ) -> None:
        """``shares_gpus``: the workers sleep while the learner works. ``note`` reports what happens to them."""
        self._supervisor = Supervisor(config, factory, note)
        self._scheduler = self._supervisor.scheduler
        self._control, self._note, self._timeouts = control, note, config.timeouts
        self._most_workers = factory.num_places
        self._shares_gpus, self._asleep = shares_gpus, False
        self._may_start = True  # False while the learner holds the memory that a new worker needs, or is about to
        self._transport: Transport | None = None
        self._sent_bytes = 0  # of one copy, in the last publish
        self._environments: Crew | None = None
        self._groups: dict[int, GroupInProgress | Turn] = {}
        self._finished: dict[int, list[Rollout]] = {}
        self._load = LoadMeter(on_policy=config.rollout.max_staleness == 0)
        self._autoscaler = Autoscaler(config.rollout.autoscale) if config.rollout.autoscale else None
        self._driver_waits = False
        self._looked_s = 0.0
        self._failure: BaseException | None = None
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="rollout-pool", daemon=True)

    # Life

    def launch(self) -> None:
        """Creates the first workers, without waiting for them."""
        self._supervisor.launch()

    def await_started(self) -> None:
        """Waits for the first workers. Raises what kept one from starting."""
        self._supervisor.await_started()
        self._thread.start()

    def connect(self, transport: Transport | None, environments: Crew | None = None) -> None:
        """Sets how weights arrive from the learner (None: workers serve the model that they have loaded), and who runs
        the episodes of an environment; without one, a group consists of single completions."""
        with self._lock:
            self._transport, self._environments = transport, environments
            if environments:
                environments.connect(self)

    def close(self) -> None:
        """Ends the listening thread and every worker."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._supervisor.close()

    def members(self) -> list[Member]:
        """The workers that are running."""
        with self._lock:
            return self._supervisor.members(self._scheduler.in_state(State.SYNCING, State.LIVE, State.DRAINING))

    def ask(self, method: str, doing: str) -> list[Any]:
        """Calls a method without arguments on all running workers; those that fail to answer are replaced."""
        with self._lock:
            up = self._scheduler.in_state(State.SYNCING, State.LIVE)
            return list(self._supervisor.call(up, method, doing).values())

    def scale(self, kind: str, num_workers: int, reason: str) -> None:
        """Changes how many workers of a kind there should be; they come and go in the background."""
        with self._lock:
            targets = self._supervisor.targets
            if why := no_room(num_workers, self._most_workers):
                self._note(f"rollout pool: stays at {targets[kind]} {kind} worker(s), not {num_workers}: {why}")
            elif targets[kind] != num_workers:
                self._note(f"rollout pool: {targets[kind]} -> {num_workers} {kind} worker(s): {reason}")
                targets[kind] = num_workers

    # Groups

    def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        greedy: bool = False,
        with_logprobs: Collection[int] = (),
    ) -> list[int]:
        """Queues groups; each goes to a single worker, so that its completions share their prompt's cache."""
        assert not self._asleep, "a sleeping pool cannot sample; publish wakes it"
        with self._lock:
            if self._environments:
                ids = self._environments.submit(
                    prompts, group_size=group_size, greedy=greedy, with_logprobs=with_logprobs
                )
                self._open_episodes()
                return ids
            ids = []
            for position, prompt in enumerate(prompts):
                group_id = self._scheduler.enqueue(
                    prompt_id=prompt.id, prompt_tokens=len(prompt.token_ids), num_samples=group_size
                )
                self._groups[group_id] = GroupInProgress(prompt, group_size, greedy, position in with_logprobs)
                ids.append(group_id)
            self._dispatch()
        return ids

    def next_groups(self, ids: Collection[int]) -> dict[int, list[Rollout]]:
        """Waits for one of these groups, then returns all that have finished, in the order in which they did.

        Raises DeadlineError at timeouts.generate_s.
        """
        started = time.monotonic()
        with self._lock:
            self._driver_waits = True
            try:
                while not (found := [i for i in self._finished if i in ids]):
                    self._raise_failure()
                    left = started + self._timeouts.generate_s - time.monotonic()
                    if left <= 0:
                        raise DeadlineError(
                            f"rollout pool: no group finished within {self._timeouts.generate_s:g} s "
                            f"({self._describe()}); raise timeouts.generate_s, or lower rollout.max_completion_tokens; "
                            f"{stacks.kept(self.members())}"
                        )
                    self._lock.wait(left)
            finally:
                self._driver_waits = False
                self._load.waited(time.monotonic() - started)
            return {i: self._finished.pop(i) for i in found}

    def _dispatch(self) -> None:
        if self._asleep:
            return
        requests: defaultdict[int, list[Request]] = defaultdict(list)
        for assignment in [*self._scheduler.dispatch(), *self._scheduler.take_over()]:
            group_id = assignment.group
            requests[assignment.worker] += [self._groups[group_id].request(group_id, i) for i in assignment.samples]
        self._supervisor.send(requests)

    def _take(self, worker_id: int, group_id: int, sample: int, completion: Completion) -> None:
        """Takes a completion that came back; the last one finishes its group."""
        group = self._groups[group_id]
        if isinstance(group, Turn):
            assert self._environments
            del self._groups[group_id]
            self._environments.answer(group, worker_id, completion)
            return
        group.add(sample, completion)
        if len(group.rollouts) == group.size:
            del self._groups[group_id]
            self.finish(group_id, [group.rollouts[i] for i in range(group.size)])

    # Turns: what the environments ask for

    def sample(self, turn: Turn) -> int:
        """Queues a turn of an episode, before the first turns of others; returns its id."""
        episode, num_tokens = turn.episode, len(turn.asked.token_ids)
        if turn.asked.turn == 0:
            turn_id = self._scheduler.enqueue(prompt_id=turn.group.prompt.id, prompt_tokens=num_tokens, num_samples=1)
        else:
            turn_id = self._scheduler.enqueue_turn(
                prompt_id=turn.group.prompt.id,
                prompt_tokens=num_tokens,
                home=episode.home,
                cached_tokens=episode.cached_tokens,
            )
        self._groups[turn_id] = turn
        return turn_id

    def cancel(self, turn_id: int) -> None:
        """Nobody wants this turn any more."""
        del self._groups[turn_id]
        self._supervisor.cancel(turn_id)

    def finish(self, group_id: int, rollouts: list[Rollout]) -> None:
        """A group is done: the driver may have it."""
        self._finished[group_id] = rollouts
        self._lock.notify_all()

    def _open_episodes(self) -> None:
        """Begins as many as keep the workers busy."""
        assert self._environments
        capacity = sum(worker.capacity for worker in self._scheduler.in_state(State.LIVE))
        self._environments.open(most=OPEN_PER_SAMPLE * capacity)

    # Weights

    def publish(self, version: int) -> dict[str, float]:
        """Commits the learner's weights as ``version`` on every running worker; one that fails is replaced.

        Unfinished completions stay where they are and continue with the new weights. Draining workers are ended
        instead, and others finish their work.
        """
        started = time.monotonic()
        with self._lock:
            self._raise_failure()
            for worker in self._scheduler.in_state(State.DRAINING):
                self._supervisor.retire(worker.id)
            for worker in self._scheduler.in_state(State.LIVE):
                self._scheduler.suspend(worker.id)
            self._scheduler.advance(version)
            self._sync(self._scheduler.in_state(State.SYNCING))
            metrics = self._close_step()
            self._dispatch()
        return metrics | {
            "weight_sync/publish_s": time.monotonic() - started,
            "weight_sync/version": float(version),
            "weight_sync/sent_mib": self._sent_bytes / 2**20,
        }

    def sleep(self) -> None:
        """Has workers that share the learner's GPU free its memory until the next ``publish``.

        Those that are starting come up first: the learner's memory is what they load into, and if they were ended each
        time that generating is shorter than their start, they would never serve.
        """
        if not self._shares_gpus or self._asleep:
            return
        with self._lock:
            self._may_start = False
            self._await_starting()
            self._asleep = True
            self._supervisor.call(self._scheduler.in_state(State.SYNCING, State.LIVE), "sleep", "going to sleep")

    def _await_starting(self) -> None:
        """The listening thread ends the wait: it hears who is up, and gives up who is not in ``timeouts.start_s``."""
        if starting := self._scheduler.in_state(State.STARTING):
            self._note(f"rollout pool: the learner waits until {len(starting)} new worker(s) have loaded")
        while self._scheduler.in_state(State.STARTING):
            self._raise_failure()
            self._lock.wait(LISTEN_S)

    def _sync(self, workers: Sequence[Worker]) -> None:
        """Brings workers to the pool's version; those that confirm the learner's checksums are live from then on."""
        deadline = Deadline(self._timeouts.publish_s, "timeouts.publish_s")
        sleepers = list(workers) if self._asleep else []
        self._supervisor.call(sleepers, "wake_weights", "waking up")
        workers = [worker for worker in workers if worker.state is State.SYNCING]
        for member, error in self._update(self._supervisor.members(workers), deadline).items():
            if isinstance(error, UnwrittenWeightsError):  # the model's fault: another worker would fail too
                raise error
            self._supervisor.fail(member.rank, error)
        self._supervisor.call([w for w in sleepers if w.state is State.SYNCING], "wake_cache", "waking up")
        self._asleep, self._may_start = False, True
        for worker in workers:
            if worker.state is State.SYNCING:
                self._supervisor.admit(worker.id)

    def _update(self, members: Sequence[Member], deadline: Deadline) -> dict[Member, RlhfError]:
        """Commits the pool's version on these workers; returns those that failed."""
        version = self._scheduler.version
        if self._transport is None:
            as_loaded = ActorGroup(members).call("commit", version, deadline=deadline, doing="committing weights")
            return as_loaded.gather()[1]
        result = publish(version, self._transport, members, deadline)
        self._sent_bytes = result.num_bytes
        if result.broken:
            self._note(f"rollout pool: a publish was repeated: {result.broken}")
        return result.failed

    def _close_step(self) -> dict[str, float]:
        """Judges the load since the last publish; returns the pool's metrics."""
        load = self._load.close()
        num_workers = self._supervisor.targets[DEFAULT_KIND]
        live = self._scheduler.in_state(State.LIVE)
        if self._autoscaler:
            settled = sum(worker.kind == DEFAULT_KIND for worker in live) == num_workers
            if decision := self._autoscaler.judge(load, num_workers=num_workers, settled=settled):
                self.scale(DEFAULT_KIND, decision.num_workers, decision.reason)
        return {
            "pool/live_workers": float(len(live)),
            "pool/wanted_workers": float(sum(self._supervisor.targets.values())),
            "pool/replaced_workers": float(self._supervisor.num_replaced),
            "pool/queued_groups": float(len(self._scheduler.queue)),
            "pool/busy_s": load.busy_worker_s / max(1, len(live)),
            "pool/idle_fraction": load.idle_fraction,
            "pool/wait_fraction": load.wait_fraction,
            **(self._environments.metrics() if self._environments else {}),
        }

    # The listening thread

    def _listen(self) -> None:
        try:
            while not self._closing.is_set():
                with self._lock:
                    refs = self._supervisor.refs()
                    env_refs = self._environments.refs() if self._environments else {}
                calls = [*refs, *env_refs]
                if not calls:
                    time.sleep(LISTEN_S)
                ready = wait_for_some(calls, LISTEN_S, linger_s=len(calls) * LINGER_S) if calls else []
                with self._lock:
                    for ref in ready:
                        if self._environments and ref in env_refs:
                            self._environments.hear(env_refs[ref], ref)
                            continue
                        for accepted in self._supervisor.hear(refs[ref], ref):
                            self._take(*accepted)
                    if self._environments:
                        self._environments.flush()
                        self._open_episodes()
                    if time.monotonic() - self._looked_s >= LOOK_S * len(self._scheduler.workers):
                        self._look_around()
                    elif self._scheduler.queue:
                        self._dispatch()
        except BaseException as error:
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _look_around(self) -> None:
        """Keeps the pool at its size, hands out work, and takes requests to scale."""
        self._looked_s = time.monotonic()
        self._load.looked(self._supervisor.count_time, driver_waits=self._driver_waits)
        for kind, count in self._control.poll(self._state, dict(self._supervisor.targets)).items():
            self.scale(kind, count, "requested by rlhf scale")
        self._supervisor.reconcile(asleep=self._asleep, may_start=self._may_start)
        if self._environments:
            self._environments.look()
        if self._driver_waits and self._scheduler.version >= 0 and (joining := self._scheduler.in_state(State.SYNCING)):
            self._sync(joining)
        self._dispatch()

    def _state(self) -> dict[str, Any]:
        """What `rlhf scale` and `rlhf status` show."""
        return {
            "workers": self._supervisor.status(),
            "version": self._scheduler.version,
            "queued_groups": len(self._scheduler.queue),
            "unfinished_groups": len(self._groups),
            "replaced_workers": self._supervisor.num_replaced,
            "asleep": self._asleep,
            "episodes": self._environments.describe() if self._environments else None,
        }

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _describe(self) -> str:
        states = [str(worker.state) for worker in self._scheduler.workers.values() if worker.state is not State.DEAD]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)) or "none"
        episodes = f"; {self._environments.describe()}" if self._environments else ""
        queued = len(self._scheduler.queue)
        return f"workers: {counts}; {queued} group(s) queued, {len(self._groups)} unfinished{episodes}"
