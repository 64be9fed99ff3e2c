"""The receiving end of a weight publish, inside vLLM's worker processes.

Named as vLLM's ``worker_extension_cls``, so that every worker process imports it, which registers our engine with
vLLM's native weight-transfer API. vLLM creates the engine, and starts and finishes updates. Joining and receiving are
our own calls (``WorkerExtension``): they return the checksum of every bucket as it arrived, or why the transfer was
aborted.

Weights are copied straight into the live model if vLLM keeps them as loaded, else loaded by its layer-wise reload.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.weights.channel import Receiver, Rendezvous, Session, TransferAbortedError
from actors.weights.load_plan import Copies, LoadPlan, UnplannableError, keeps_weights_as_loaded
from actors.weights.routes import session_route
from actors.weights.vllm_adapter import install, without_wrappers
from rlhf.training.weights import (
    Layout,
    PlainLayout,
    TensorSpec,
    bucket_size,
    checksum,
    first_adapter_bucket,
    from_plain,
    is_of_adapter,
    view_bucket,
)

BACKEND = "rlhf"


class BucketReceiver(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):
    """Receives buckets, computes their checksums and loads them."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo

    unwritten: list[str]  # modules that the last update did not write, or not completely
    has_frozen = False  # the weights that never change are in place
    _session: Session | None = None
    _receiver: Receiver | None = None
    _layout: Layout | None = None
    _plan: LoadPlan | None = None
    _copies: dict[int, Copies]  # of this session, by bucket
    _reloading = False  # vLLM's layer-wise reload is in progress
    _partial: Tensor  # a tensor whose rows have not all arrived
    _matrices: dict[str, Tensor]  # of the adapter that has arrived

    def join(
        self,
        *,
        route: str,
        rendezvous: Mapping[str, Any],
        first_receiver: int,
        layout: PlainLayout,
        handles: Mapping[str, bytes],
        timeout_s: float,
    ) -> None:
        """Leaves the previous session and joins this one. Raises TransferAbortedError.

        ``rendezvous``: a Rendezvous as a dict. This engine's processes are numbered from ``first_receiver``.
        ``handles``: of the senders' rings, by place, if the route needs them.
        """
        self.shutdown()
        if (new_layout := from_plain(layout)) != self._layout:
            self._layout, self._plan = new_layout, self._make_plan(new_layout)
        self._session = Session(Rendezvous(**rendezvous), timeout_s)
        self._receiver = session_route(route).receiver(
            self._session,
            first_receiver + self.parallel_config.rank,
            self.device,
            slot_bytes=max(bucket_size(specs) for specs in new_layout),
            handles=handles,
        )

    def _make_plan(self, layout: Layout) -> LoadPlan | None:
        """How to copy into the live model, or None where weights must go through vLLM's loader."""
        with without_wrappers(self.model):
            if self.device.type != "cuda" or not keeps_weights_as_loaded(self.model):
                return None
            try:
                return LoadPlan(self.model, self.model.load_weights, layout[: first_adapter_bucket(layout) or None])
            except UnplannableError:
                return None

    @property
    def loads_in_place(self) -> bool:
        return self._plan is not None

    def start_weight_update(self) -> None:
        self._matrices = {}
        if self._reloading:  # the last update broke off: this reassembles its layers, whatever they hold
            self._finish_reload()

    def receive_session(self, timeout_s: float, *, frozen: bool) -> list[int]:
        """Loads what the session's sender sends; returns the buckets' checksums. Raises TransferAbortedError."""
        assert self._session is not None and self._receiver is not None and self._layout is not None
        self._session.renew(timeout_s)
        layout = self._layout if frozen else self._layout[first_adapter_bucket(self._layout) :]
        buckets = self._receiver.buckets([bucket_size(specs) for specs in layout])
        if self._plan is None:  # vLLM's loader keeps references, but slots are reused
            buckets = (bucket.clone() for bucket in buckets)
        try:
            return self._load(layout, buckets)
        except TransferAbortedError:
            self.shutdown()  # at once: a broadcast from a dead process holds the device
            raise

    def receive_objects(self, layout: Layout, data: Sequence[Any]) -> list[int]:
        """Loads buckets, given as NumPy arrays of bytes; returns their checksums. For models on CPU."""
        assert self._plan is None, "a plan needs buckets that have the same slots in every update"
        return self._load(layout, (torch.from_numpy(array.copy()) for array in data))

    @torch.no_grad()
    def _load(self, layout: Layout, buckets: Iterable[Tensor]) -> list[int]:
        """Loads all buckets; returns the checksum of each as it arrived."""
        sums = []
        # buckets first in zip: asking for the next one signals to the sender that the last is emptied
        for index, (bucket, specs) in enumerate(zip(buckets, layout, strict=True)):
            sums.append(checksum(bucket))
            if is_of_adapter(specs[0].name):
                self._matrices |= dict(self._whole_tensors(specs, bucket.clone()))  # hundreds of small ones at once
                continue
            self.has_frozen = False  # until all have arrived
            if self._plan is None:
                self._reload(specs, bucket)
                continue
            if index not in self._copies:  # a bucket has the same slot every time
                self._copies[index] = self._plan.copies(specs, bucket)
            for target, source in self._copies[index]:
                target.copy_(source)
        return torch.stack(sums).tolist()

    def _reload(self, specs: Sequence[TensorSpec], bucket: Tensor) -> None:
        with without_wrappers(self.model):
            if not self._reloading:
                self._elements = parameter_elements(self.model)
                initialize_layerwise_reload(self.model)
                self._reloading = True
            self.model.load_weights(self._whole_tensors(specs, bucket))

    def _finish_reload(self) -> None:
        with without_wrappers(self.model):
            self.unwritten = unwritten_modules(self.model, self._elements)
            finalize_layerwise_reload(self.model, self.model_config)
            self._reloading = False

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
        self.unwritten = []  # a LoadPlan writes every element
        if self._reloading:
            self._finish_reload()
            if self.device.type == "cpu":
                repack_tied_heads(self.model)
        self.has_frozen = not self.unwritten

    def install_adapter(self, alpha: int) -> list[str]:
        """Samples with the adapter that has arrived; returns what vLLM has no place for: see vllm_adapter.install."""
        matrices, self._matrices = self._matrices, {}
        return install(self.model, matrices, alpha=alpha)

    def lose_weights(self) -> None:
        """All are about to be lost."""
        self.has_frozen = False
        if hasattr(self.model, "lora_manager"):
            self.model.lora_manager.remove_all_adapters()

    @torch.no_grad()
    def read_back(self) -> list[int]:
        """The buckets' checksums from the live parameters: equal to the learner's if every byte is where it belongs.

        For models that are loaded in place and not sharded over processes.
        """
        assert self._plan is not None and self._layout is not None and self.parallel_config.world_size == 1
        sums = []
        for specs in self._layout[: first_adapter_bucket(self._layout) or None]:
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

    def _unused(self, *args: Any) -> None:
        """Abstract in vLLM (the last only in 0.25); ``join`` and ``receive_...`` replace them and return more."""
        raise NotImplementedError

    init_transfer_engine = receive_weights = trainer_send_weights = _unused


def parameter_elements(model: torch.nn.Module) -> dict[str, int]:
    """The number of elements of each module that has parameters; tied ones count for the first module."""
    elements: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        elements[module] = elements.get(module, 0) + parameter.numel()
    return elements


def unwritten_modules(model: torch.nn.Module, elements: dict[str, int]) -> list[str]:
    """Modules that vLLM's reload, about to finish, has not loaded completely. vLLM itself only warns."""
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
    """Repacks tied LM heads: on CPU they keep a packed copy of the OLD weights through vLLM's reload."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods added to vLLM's worker class; called through ``collective_rpc``."""

    weight_transfer_engine: BucketReceiver
    vllm_config: Any

    def peak_gpu_memory_bytes(self) -> int:
        """The most GPU memory that this process has reserved."""
        return torch.cuda.max_memory_reserved()

    def reserved_gpu_memory_bytes(self) -> int:
        """The GPU memory that this process holds after emptying torch's cache."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def begin_weight_update(self) -> bool:
        """vLLM's ``start_weight_update``, made to work after an update that broke off; returns whether the weights
        that never change are in place."""
        self._weight_update_active = False
        self.start_weight_update()  # type: ignore[attr-defined]
        return self.weight_transfer_engine.has_frozen

    def join_session(self, info: dict[str, Any]) -> str:
        """BucketReceiver.join with ``info`` as its arguments; returns why it was aborted, or ''.

        An error would lose its type on the way to the worker's actor, here as in ``receive_session``.
        """
        try:
            self.weight_transfer_engine.join(**info)
        except TransferAbortedError as error:
            return str(error)
        return ""

    def receive_session(self, timeout_s: float, frozen: bool) -> tuple[list[int], str]:
        """(checksums of the current session's buckets, why the transfer was aborted or '')."""
        try:
            with set_current_vllm_config(self.vllm_config):
                return self.weight_transfer_engine.receive_session(timeout_s, frozen=frozen), ""
        except TransferAbortedError as error:
            return [], str(error)

    def receive_objects(self, layout: PlainLayout, data: list[Any]) -> list[int]:
        """See BucketReceiver.receive_objects."""
        with set_current_vllm_config(self.vllm_config):
            return self.weight_transfer_engine.receive_objects(from_plain(layout), data)

    def install_adapter(self, alpha: int) -> list[str]:
        """See BucketReceiver.install_adapter."""
        return self.weight_transfer_engine.install_adapter(alpha)

    def lose_weights(self) -> None:
        """See BucketReceiver.lose_weights."""
        self.weight_transfer_engine.lose_weights()

    def unwritten_modules(self) -> list[str]:
        """Modules that the update just finished left unwritten."""
        return self.weight_transfer_engine.unwritten

    def loads_weights_in_place(self) -> bool:
        return self.weight_transfer_engine.loads_in_place

    def read_back_weights(self) -> list[int]:
        """See BucketReceiver.read_back."""
        return self.weight_transfer_engine.read_back()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketReceiver)
