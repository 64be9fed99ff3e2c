"""The receiving end of a weight publish, inside vLLM's worker processes.

Named as vLLM's ``worker_extension_cls``, so that importing it in every worker process registers our engine with vLLM's
native weight-transfer API (initialise, start, update, finish). One engine for three transports, because all need the
same two things that the built-in ones lack: a CPU path, and a checksum of every bucket as it arrived.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actors.transport import broadcast, join_broadcast_group, open_ipc_handle
from rlhf.weights import TensorSpec, bucket_size, checksum, view_bucket

BACKEND = "rlhf"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How to join the learner's NCCL broadcast group."""

    address: str
    port: int
    first_rank: int  # of this engine's workers in the group; the learner is rank 0
    world_size: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One or more buckets, by one of three ways.

    ``data``: the bytes themselves. ``handles``: CUDA IPC handles by GPU UUID. Neither: broadcast over NCCL.
    """

    layout: list[list[dict[str, Any]]]
    data: Any = None
    handles: dict[str, bytes] = field(default_factory=dict)


class BucketReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets, notes their checksums, and loads them layer by layer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        rank = init_info.first_rank + self.parallel_config.rank
        self.group = join_broadcast_group(
            init_info.address, init_info.port, rank, init_info.world_size, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        self.checksums: list[int] = []
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        for bucket in update_info.layout:
            specs = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in bucket)
            data = self._receive(update_info, specs)
            self.checksums.append(checksum(data))
            # The layer-wise loader may keep references until a layer is complete: this buffer is never reused.
            self.model.load_weights((spec.name, view_bucket(data, spec)) for spec in specs)

    def _receive(self, update_info: UpdateInfo, specs: tuple[TensorSpec, ...]) -> Tensor:
        if update_info.data is not None:
            return torch.frombuffer(bytearray(update_info.data), dtype=torch.uint8).to(self.device)
        if update_info.handles:
            return open_ipc_handle(update_info.handles, self.device).clone()
        data = torch.empty(bucket_size(specs), dtype=torch.uint8, device=self.device)
        broadcast(self.group, data)
        return data

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def shutdown(self) -> None:
        self.group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM 0.25; the sending end is actors/weight_sync.py."""
        raise AssertionError("weights are sent by actors.weight_sync")


def repack_tied_heads(model: torch.nn.Module) -> None:
    """On CPU a tied LM head keeps a packed copy of the OLD weights through vLLM's reload; packs it again."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods added to vLLM's worker class; called through ``collective_rpc``."""

    def peak_gpu_memory_bytes(self) -> int:
        """The most that this process has had reserved."""
        return torch.cuda.max_memory_reserved()

    def received_checksums(self) -> list[int]:
        """The checksum of every bucket of the last update, in order."""
        return self.weight_transfer_engine.checksums  # type: ignore[attr-defined]


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
