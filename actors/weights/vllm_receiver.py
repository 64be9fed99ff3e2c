"""The receiving end of a weight publish, inside vLLM's worker processes.

Named as vLLM's ``worker_extension_cls``, so that importing it in every worker process registers our engine with vLLM's
native weight-transfer API (initialise, start, update, finish). One engine for three transports, because all need the
same that the built-in ones lack: a CPU path, checksums of every bucket as it arrived, and a way out when a peer dies.

Weights are copied straight into the live model where vLLM keeps them as loaded; else through its layer-wise reload.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.weights.channel import (
    BroadcastReceiver,
    Receiver,
    Rendezvous,
    Session,
    SharedReceiver,
    TransferAbortedError,
)
from actors.weights.load_plan import Copies, LoadPlan, UnplannableError, keeps_weights_as_loaded
from rlhf.training.weights import Layout, TensorSpec, bucket_size, checksum, view_bucket

BACKEND = "rlhf"

PlainLayout = list[list[dict[str, Any]]]
"""A Layout of lists and dicts only, which is what vLLM's messages between its processes carry."""


def _layout(plain: PlainLayout) -> Layout:
    shapes = ("shape", "full_shape")
    return [tuple(TensorSpec(**{**spec, **{key: tuple(spec[key]) for key in shapes}}) for spec in b) for b in plain]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Which session to join. ``handles``: of the rings to share, by place; without them buckets are broadcast."""

    rendezvous: dict[str, Any]
    first_receiver: int  # this engine's processes are receivers from here on
    timeout_s: float
    layout: PlainLayout
    handles: dict[str, bytes] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """All buckets of the session, or those of ``layout`` as bytes in ``data``, one after the other."""

    timeout_s: float = 0.0
    layout: PlainLayout = field(default_factory=list)
    data: list[Any] = field(default_factory=list)


class BucketReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets, sums them up, and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    aborted = ""  # why the last join or transfer was given up
    unwritten: list[str]  # modules that the last update left as they were, wholly or in part
    _sums: list[Tensor]
    _session: Session | None = None
    _receiver: Receiver | None = None
    _layout: Layout | None = None
    _plan: LoadPlan | None = None
    _reloading = False  # vLLM's layer-wise reload is under way
    _partial: Tensor  # a tensor of which not all rows have come

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leaves the session before and joins this one; ``aborted`` says why not, if not."""
        self.shutdown()
        self.aborted, self._sums = "", []
        layout = _layout(init_info.layout)
        if layout != self._layout:
            self._layout, self._plan = layout, self._make_plan(layout)
        self._copies: dict[int, Copies] = {}
        receiver = init_info.first_receiver + self.parallel_config.rank
        try:
            self._session = Session(Rendezvous(**init_info.rendezvous), init_info.timeout_s)
            if init_info.handles:
                self._receiver = SharedReceiver(self._session, receiver, self.device, init_info.handles)
            else:
                slot_bytes = max(bucket_size(specs) for specs in layout)
                self._receiver = BroadcastReceiver(self._session, receiver, self.device, slot_bytes)
        except TransferAbortedError as error:
            self.aborted = str(error)

    def _make_plan(self, layout: Layout) -> LoadPlan | None:
        """How to copy into the live model, or None where weights must go through vLLM's loader."""
        if self.device.type != "cuda" or not keeps_weights_as_loaded(self.model):
            return None
        try:
            return LoadPlan(self.model, self.model.load_weights, layout)
        except UnplannableError:
            return None

    @property
    def loads_in_place(self) -> bool:
        return self._plan is not None

    def start_weight_update(self) -> None:
        self.aborted, self._sums = "", []
        if self._reloading:  # an update before was broken off: this puts its layers together again, whatever is in them
            finalize_layerwise_reload(self.model, self.model_config)
            self._reloading = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        for specs, data in zip(_layout(update_info.layout), update_info.data, strict=True):
            bucket = torch.from_numpy(data.copy())
            self._sums.append(checksum(bucket))
            self._reload(specs, bucket)
        if update_info.data:
            return
        assert self._session is not None and self._receiver is not None and self._layout is not None
        self._session.renew(update_info.timeout_s)
        try:
            for index, bucket in enumerate(self._receiver.buckets([bucket_size(specs) for specs in self._layout])):
                self._sums.append(checksum(bucket))
                if self._plan is None:
                    self._reload(self._layout[index], bucket.clone())  # the layer-wise loader keeps references
                    continue
                if index not in self._copies:  # a bucket has the same slot every time
                    self._copies[index] = self._plan.copies(self._layout[index], bucket)
                for target, source in self._copies[index]:
                    target.copy_(source)
        except TransferAbortedError as error:
            self.aborted = str(error)
            self.shutdown()  # at once: a broadcast from the dead holds the device

    def _reload(self, specs: Sequence[TensorSpec], bucket: Tensor) -> None:
        if not self._reloading:
            self._elements = parameter_elements(self.model)
            initialize_layerwise_reload(self.model)
            self._reloading = True
        self.model.load_weights(self._whole_tensors(specs, bucket))

    def _whole_tensors(self, specs: Sequence[TensorSpec], bucket: Tensor) -> Iterator[tuple[str, Tensor]]:
        for spec in specs:
            rows = view_bucket(bucket, spec)
            if spec.is_whole:
                yield spec.name, rows
                continue
            if spec.first_row == 0:
                self._partial = rows.new_empty(spec.full_shape)
            end = spec.first_row + spec.shape[0]
            self._partial[spec.first_row : end] = rows
            if end == spec.full_shape[0]:
                yield spec.name, self._partial

    def finish_weight_update(self) -> None:
        self.unwritten = []
        if not self._reloading:
            return  # a LoadPlan writes every element, or is none
        self.unwritten = unwritten_modules(self.model, self._elements)
        finalize_layerwise_reload(self.model, self.model_config)
        self._reloading = False
        if self.device.type == "cpu":
            repack_tied_heads(self.model)

    def checksums(self) -> list[int]:
        """Of every bucket of this update, in order; they are there once the buckets are loaded."""
        return torch.stack(self._sums).tolist() if self._sums else []

    @torch.no_grad()
    def read_back(self) -> list[int]:
        """The buckets' checksums, from the live parameters: the learner's own, if every byte is where it belongs.

        For models that are loaded in place and not sharded over processes.
        """
        assert self._plan is not None and self._layout is not None and self.parallel_config.world_size == 1
        sums = []
        for specs in self._layout:
            bucket = torch.zeros(bucket_size(specs), dtype=torch.uint8, device=self.device)
            for target, source in self._plan.copies(specs, bucket):
                source.copy_(target)
            sums.append(int(checksum(bucket)))
        return sums

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = self._session = None
        self._copies = {}

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM 0.25; the sending end is actors/weights/sender.py."""
        raise AssertionError("weights are sent by actors.weights.sender")


def parameter_elements(model: torch.nn.Module) -> dict[str, int]:
    """Of each module that has parameters: how many elements; of tied ones the first."""
    elements: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        elements[module] = elements.get(module, 0) + parameter.numel()
    return elements


def unwritten_modules(model: torch.nn.Module, elements: dict[str, int]) -> list[str]:
    """Modules of which vLLM's reload, about to be finished, has not loaded every element. vLLM itself only warns."""
    unwritten = []
    for name, wanted in elements.items():
        layer = model.get_submodule(name)
        reload = get_layerwise_info(layer)
        if not reload.can_load():  # complete, and already processed
            continue
        padded = isinstance(layer, VocabParallelEmbedding) and reload.load_numel > 0  # nothing reads the padding
        if reload.load_numel < wanted and not padded:
            unwritten.append(name)
    return unwritten


def repack_tied_heads(model: torch.nn.Module) -> None:
    """On CPU a tied LM head keeps a packed copy of the OLD weights through vLLM's reload; packs it again."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods added to vLLM's worker class; called through ``collective_rpc``."""

    weight_transfer_engine: BucketReceiver

    def peak_gpu_memory_bytes(self) -> int:
        """The most that this process has had reserved."""
        return torch.cuda.max_memory_reserved()

    def reserved_gpu_memory_bytes(self) -> int:
        """What this process holds now, torch's cache emptied."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def begin_weight_update(self) -> None:
        """vLLM's ``start_weight_update``, which refuses to follow an update that was broken off."""
        self._weight_update_active = False
        self.start_weight_update()  # type: ignore[attr-defined]

    def received_weights(self) -> tuple[list[int], str]:
        """(the checksum of every bucket of the last update, why it was aborted if it was)."""
        engine = self.weight_transfer_engine
        return ([] if engine.aborted else engine.checksums()), engine.aborted

    def unwritten_modules(self) -> list[str]:
        """As BucketReceiver's, of the update just finished."""
        return self.weight_transfer_engine.unwritten

    def loads_weights_in_place(self) -> bool:
        return self.weight_transfer_engine.loads_in_place

    def read_back_weights(self) -> list[int]:
        """As BucketReceiver.read_back."""
        return self.weight_transfer_engine.read_back()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
