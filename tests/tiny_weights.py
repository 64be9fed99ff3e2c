"""Small actors that send and receive weights as learner ranks and vLLM's processes do, and can be told to misbehave.

On GPUs where there are any, one for each actor that books one.
"""

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn

from actors.group import Deadline, Member, RankActor
from actors.rollouts.engine import Ready
from actors.weights import broadcast
from actors.weights.channel import Rendezvous, Session, TransferAbortedError
from actors.weights.load_plan import LoadPlan
from actors.weights.publish import PublishResult, publish
from actors.weights.routes import ROUTES
from actors.weights.sender import WeightSender
from actors.weights.transports import SessionTransport
from rlhf.training.weights import bucket_size, checksum, from_plain

BUCKET_BYTES = 40_000
NUM_BUCKETS = 21
NEVER_S = 1e5  # a deadline that nobody may wait for: the test would not end


class TinyModel(nn.ParameterDict):
    """Weights by name, and no adapters beside them."""

    adapters: Mapping[str, Any] = {}


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return TinyModel({"embed": torch.randn(2000, 64), **{f"layer{i}": torch.randn(64, 99) for i in range(12)}})


def own_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class TinyLearner(RankActor):
    """One rank that holds a few weights."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.model = make_model(0).to(own_device())
        self.sender = WeightSender(self.model, own_device(), BUCKET_BYTES)  # type: ignore[arg-type]

    def change(self, seed: int) -> None:
        self.model.load_state_dict(make_model(seed).state_dict())

    def weight_layout(self) -> Any:
        return self.sender.layout

    def host_rendezvous(self, timeout_s: float) -> int:
        return self.sender.host_rendezvous(self.node(), timeout_s)

    def join_weights(self, *args: Any) -> Any:
        return self.sender.join(*args)

    def send_weights(self, timeout_s: float, frozen: bool) -> list[int]:
        return self.sender.send(timeout_s, frozen=frozen)


class TinyWorker(RankActor):
    """Receives as a vLLM worker does, and can be told to misbehave at some bucket of the next transfer."""

    def __init__(self) -> None:
        self.model = make_model(99).to(own_device()).requires_grad_(False)
        self.misdeed, self.bucket, self.joined = "", -1, 0  # 'die', 'hang', ... at this bucket; sessions joined
        self.receiver: Any = None
        self.version = -1

    def misbehave(self, misdeed: str, bucket: int) -> None:
        self.misdeed, self.bucket = misdeed, bucket

    def be_good(self) -> None:
        self.misdeed, self.bucket, self.version, self.joined = "", -1, -1, 0
        self.model.load_state_dict(make_model(99).state_dict())

    def begin_update(self) -> Ready:
        return Ready(1)

    def join_weights(self, info: dict[str, Any]) -> None:
        self.joined += 1
        if self.misdeed == "die joining":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.misdeed == "die connecting":  # its peers are in the library's own calls by then, or on their way there
            broadcast._process_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
        self.layout = from_plain(info["layout"])
        self.sizes = [bucket_size(specs) for specs in self.layout]
        self.plan = LoadPlan(self.model, self.load, self.layout)
        self.session = Session(Rendezvous(**info["rendezvous"]), info["timeout_s"])
        self.receiver = ROUTES[info["route"]].receiver(
            self.session,
            info["first_receiver"],
            own_device(),
            slot_bytes=max(self.sizes),
            handles=info["handles"],
        )

    def load(self, weights: Any) -> None:
        for name, tensor in weights:
            self.model[name].copy_(tensor)  # type: ignore[index]

    def receive_session(self, timeout_s: float, frozen: bool) -> list[list[int]]:
        self.session.renew(timeout_s)
        try:
            return [self.take_all()]
        except TransferAbortedError:
            self.receiver.close()
            self.receiver = None
            raise

    def take_all(self) -> list[int]:
        sums = []
        for i, (specs, data) in enumerate(zip(self.layout, self.receiver.buckets(self.sizes), strict=True)):
            if i == self.bucket:
                if self.misdeed == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.misdeed == "hang":
                    time.sleep(60)
                if self.misdeed == "raise":
                    raise ValueError("no room for this weight")
                if self.misdeed in ("flap", "flap always"):
                    self.misdeed = self.misdeed if self.misdeed == "flap always" else ""
                    self.session.abort("Connection reset by peer")
                    raise TransferAbortedError("Connection reset by peer")
                if self.misdeed == "change":
                    data = data.clone()
                    data[5] ^= 1
            for target, rows in self.plan.copies(specs, data):
                target.copy_(rows)
            sums.append(int(checksum(data)))
        return sums

    def finish_update(self) -> None: ...

    def commit(self, version: int) -> None:
        self.version = version

    def holds(self, seed: int) -> tuple[int, bool, int]:
        """(committed version, whether every parameter equals the learner's, sessions joined)."""
        expected = make_model(seed).state_dict()
        same = all(torch.equal(expected[name], p.cpu()) for name, p in self.model.named_parameters())
        return self.version, same, self.joined


def run(version: int, transport: SessionTransport, workers: list[Member], seconds: float = 60.0) -> PublishResult:
    """Publishes weights that no version before had."""
    ray.get(transport._learner.members[0].handle.change.remote(version), timeout=60)
    return publish(version, transport, workers, Deadline(seconds, "timeouts.publish_s"))


def held(workers: list[Member], version: int) -> list[tuple[int, bool, int]]:
    return ray.get([m.handle.holds.remote(version) for m in workers], timeout=60)
