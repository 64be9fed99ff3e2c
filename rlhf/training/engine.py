"""One DeepSpeed engine, shared by everything that learns: policy, critic and reward model.

It runs micro-batches through a model, takes one optimiser step over them, and saves and loads itself. The loss is
passed in as a function: a plain sum whose normaliser was fixed before the first forward, so the gradient does not
depend on how sequences were packed, into how many micro-batches, or over how many ranks.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.batch import TrainBatch
from rlhf.checkpoint import Written, writes_checkpoint
from rlhf.config import LearnerConfig
from rlhf.errors import CheckpointError
from rlhf.models.inputs import PackedInputs, packed_inputs
from rlhf.models.lora import add_adapters, use_own_adapters
from rlhf.models.nf4 import keep_in_4_bits
from rlhf.models.packed import PackedModel
from rlhf.models.probe import check_packing
from rlhf.training.export import export
from rlhf.training.host_memory import aligned
from rlhf.training.parking import Parking
from rlhf.training.resharding import Layout, LiveState, SavedState
from rlhf.training.setup import deepspeed_config, gather_by_layer, lr_factor, make_optimizer

LossFn = Callable[[Any, TrainBatch], tuple[Tensor, dict[str, Tensor]]]
"""(model output, its micro-batch on the same device) -> (loss, stats): sums over the micro-batch, which are added over
micro-batches and ranks; of a stat whose name ends in ``_max``, the largest is kept. It should not wait for the device:
below ZeRO-3, whose backward waits anyway, the host then runs ahead."""

SMALL_BYTES = 1 << 20  # of a checkpoint, for all but weights and optimiser state: counters, the random state
DUMMY_TOKENS = 2  # a rank without a sequence in a round runs this many tokens at zero weight


class Engine:
    """A packed model under DeepSpeed, on this process's only device."""

    def __init__(
        self,
        load_model: Callable[[], PackedModel],
        config: LearnerConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        total_steps: int,
    ) -> None:
        """``load_model`` runs under ZeRO-3's partitioning context, so no rank ever holds the whole model. A model that
        stands on another's layers leaves them as that one's engine has prepared them.

        ``config``: options left open are off (rlhf.planning.fit decides them beforehand).
        """
        import deepspeed
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        from rlhf.training.staged_writer import StagedWriter

        self.config, self.device = config, device
        ds_config = deepspeed_config(config, dtype)
        ds_config["train_batch_size"] = dist.get_world_size()
        # transformers finds this object through a weak reference and then loads shard by shard
        self._hf_config = HfDeepSpeedConfig(ds_config) if config.zero_stage == 3 else None
        model = load_model()
        if config.lora and config.lora.load_in_4bit and model.owns_base:
            keep_in_4_bits(model, device)
        if config.lora:
            add_adapters(model, config.lora, key=f"{config.KEY}.lora")
        if config.checkpointed_layers and model.owns_base:
            model.checkpoint_layers(config.checkpointed_layers)
        if config.compile and model.owns_base:
            model.compile_layers()
        if config.zero_stage == 3:
            ds_config["zero_optimization"] |= gather_by_layer(model)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], config)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_factor(step, config.optimizer, total_steps)
        )
        self._optimizer, self._parking = optimizer, Parking(device)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config, dist_init_required=False
        )
        self._writer, self._saved_to = StagedWriter(device), ""
        self.engine.checkpoint_engine = self._writer
        # Without ZeRO and bfloat16, DeepSpeed neither keeps nor checks the norm: both are done here.
        self._plain = config.zero_stage == 0 and not self.engine.bfloat16_enabled()
        self.engine.enable_backward_allreduce = not self._plain

    @property
    def model(self) -> PackedModel:
        module = self.engine.module
        assert isinstance(module, PackedModel)
        return module

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def probe(self, *, key: str) -> None:
        """Raises ConfigError, naming ``key``, if packing would change the model's numbers. Collective."""
        self._begin(training=False)
        check_packing(self.engine, self.model, self.device, key=key)
        self.release_gathered()

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[TrainBatch | None], pick: Callable[[Any], Tensor], *, share_prompts: bool = False
    ) -> list[Tensor]:
        """``pick(output)`` of each micro-batch, on CPU. None entries run a dummy, to keep ranks in step.

        ``share_prompts``: see ``packed_inputs``; the micro-batches were planned for it.
        """
        self._begin(training=False)
        outputs = [(batch, pick(self.engine(self._inputs(batch, share_prompts)))) for batch in micro_batches]
        return [output.cpu() for batch, output in outputs if batch is not None]  # the first wait for the device

    def step(
        self, micro_batches: Sequence[TrainBatch | None], loss_fn: LossFn, *, share_prompts: bool = False
    ) -> dict[str, float]:
        """One optimiser step over the micro-batches of all ranks. ``share_prompts``: see ``forward``.

        Returns the stats summed over micro-batches and ranks, with ``loss``, ``grad_norm`` (before clipping),
        ``learning_rate`` and ``skipped``: 1 if the loss or the gradient is not finite on any rank, which leaves
        weights, optimiser state and schedule unchanged. Every rank must pass the same number of micro-batches.
        """
        self._begin(training=True)
        sums: dict[str, Tensor] = {}
        for batch in micro_batches:
            output = self.engine(self._inputs(batch, share_prompts))
            if batch is None:
                loss, stats = _zero_loss(output), {}
            else:
                loss, stats = loss_fn(output, batch.to(self.device))
                stats = {"loss": loss.detach(), **stats}
            for name, value in stats.items():
                add_stat(sums, name, value.detach().float())
            if batch is not None:
                loss = loss + _poison(output, sums["loss"])
            self.engine.backward(loss * self.world_size)  # DeepSpeed averages over ranks; our loss is a sum
        learning_rate = self.engine.get_lr()[0]
        taken, norm = self._take_step()
        if taken and not self._writer.reserved:  # from now on there are moments
            self._writer.reserve(self._saved_bytes())
        totals = {"loss": 0.0, **self._sum_over_ranks(sums)}
        assert not taken or math.isfinite(totals["loss"]), "a loss that is not finite has poisoned the gradient"
        return {**totals, "grad_norm": float(norm), "learning_rate": learning_rate, "skipped": float(not taken)}

    def _begin(self, *, training: bool) -> None:
        """Another model on the same layers may have switched them to its own use."""
        self.engine.train(training)
        use_own_adapters(self.model)

    def _take_step(self) -> tuple[bool, Any]:
        """Clips, and steps if the gradient's norm is finite. Returns (whether it stepped, the norm or inf), the same
        on all ranks. DeepSpeed waits for the device to learn the norm, so reading it here costs nothing."""
        if not self._plain:
            self.engine.step()
            norm = self.engine.get_global_grad_norm()
            assert norm is not None, "DeepSpeed keeps the norm wherever ZeRO or bfloat16 is on"
            return self.engine.was_step_applied(), norm
        self.engine.buffered_allreduce_fallback()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if not norm.isfinite():
            self.engine.zero_grad()
            return False, norm
        self.engine.step()
        return True, norm

    def _inputs(self, batch: TrainBatch | None, share_prompts: bool) -> PackedInputs:
        batch = _dummy_batch() if batch is None else batch
        return packed_inputs(batch, self.device, share_prompts=share_prompts)

    def _sum_over_ranks(self, sums: dict[str, Tensor]) -> dict[str, float]:
        values = torch.stack(list(sums.values())).tolist() if sums else []  # waits for the device once
        own = dict(zip(sums, values, strict=True))
        if self.world_size == 1:
            return own
        gathered: list[dict[str, float] | None] = [None] * self.world_size
        dist.all_gather_object(gathered, own)
        totals: dict[str, float] = {}
        for part in gathered:
            for name, value in (part or {}).items():
                add_stat(totals, name, value)
        return totals

    def release_gathered(self) -> None:
        """Releases every gathered parameter, so that a gather may follow a forward."""
        if self.config.zero_stage == 3:
            self.engine.empty_partition_cache()

    def park_optimizer(self) -> None:
        """Moves the optimiser state to host memory. Scoring, gathering and saving still work."""
        if not self._parking.parked:
            self.release_gathered()
            self._parking.park(self._optimizer_tensors())

    def unpark_optimizer(self) -> None:
        """Brings it back; the next ``step`` or ``load`` needs it."""
        self._parking.unpark()

    def _optimizer_state(self) -> list[Tensor]:
        """float32 master weights and moments, wherever they are."""
        zero = self.engine.optimizer
        masters = getattr(zero, "fp32_partitioned_groups_flat", None)  # stage 3
        masters = masters or getattr(zero, "single_partition_of_fp32_groups", None)  # stages 1 and 2
        masters = masters or getattr(zero, "fp32_groups_flat_partition", None)  # stage 1 with float32 gradients
        tensors = [*(masters or ())]
        for master, state in self._optimizer.state.items():
            tensors += [master, *(value for value in state.values() if isinstance(value, Tensor) and value.dim())]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def _saved_bytes(self) -> int:
        """Enough for all that this rank's ``save`` copies."""
        tensors = self._optimizer_state()
        if self.config.zero_stage != 3 and self.engine.save_non_zero_checkpoint:
            tensors += [*(p for p in self.model.parameters() if p.requires_grad), *self.model.buffers()]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(map(aligned, storages.values())) + SMALL_BYTES

    def _optimizer_tensors(self) -> list[Tensor]:
        """The optimiser's state on this device; excluding what is also a weight of the model."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        others = [t for t in self._optimizer_state() if t.untyped_storage().data_ptr() not in own]
        return [tensor for tensor in others if tensor.device.type == self.device.type]

    def save(self, directory: str) -> None:
        """Copies weights, optimiser, scheduler and RNG of this rank to host memory, once the save before is written;
        from then on a thread writes them (``finish_save``). All ranks call it."""
        self.release_gathered()
        self._saved_to = directory
        with self._parking.readable(), writes_checkpoint(directory):
            self.engine.save_checkpoint(
                directory,
                tag="engine",
                client_state={"rng": torch.get_rng_state()},
                save_latest=False,
                exclude_frozen_parameters=self.config.lora is not None,
            )

    def finish_save(self, *, wait: bool) -> Written | None:
        """What this rank has written of the last ``save``; None if it is not done, for which ``wait`` waits.

        Raises CheckpointError if it could not be written.
        """
        with writes_checkpoint(self._saved_to):
            return self._writer.finish(wait=wait)

    def load(self, directory: str) -> None:
        """Reads what ``save`` wrote, on any number of ranks at any ZeRO stage. Raises CheckpointError if it cannot.

        Learning rate, schedule, weight decay and gradient clip stay this engine's own, although DeepSpeed restores
        those of the engine that saved.
        """
        if not Path(directory, "engine").is_dir():
            raise CheckpointError(f"{directory}: holds no engine checkpoint; delete it or set checkpoint.resume=none")
        try:
            saved = SavedState(Path(directory, "engine"))
            if saved.layout == self._layout:
                whole = self.config.lora is None  # frozen weights are not in it
                _, client_state = self.engine.load_checkpoint(directory, tag="engine", load_module_strict=whole)
            else:
                LiveState(self.engine, self._optimizer, self._layout).load(saved)
                client_state = saved.common
        except CheckpointError:
            raise
        except Exception as error:  # DeepSpeed raises whatever its loader raises
            raise CheckpointError(
                f"{directory}: does not load into {self.world_size} ranks at learner.zero_stage="
                f"{self.config.zero_stage} ({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
                "resume with the model.dtype and kind of device that wrote it, or from another checkpoint"
            ) from error
        assert client_state is not None
        torch.set_rng_state(client_state["rng"])
        self._apply_settings()

    @property
    def _layout(self) -> Layout:
        from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

        padded = isinstance(self.engine.optimizer, BF16_Optimizer)
        assert self.config.zero_stage is not None, "decided"
        return Layout.of(self.config.zero_stage, self.world_size, padded=padded, on_cpu=self.config.cpu_optimizer)

    def _apply_settings(self) -> None:
        """Applies settings that may differ from those of the run that saved; if none does, no bit changes."""
        settings = self.config.optimizer
        schedule: Any = self.engine.lr_scheduler
        wrapper: Any = self.engine.optimizer  # of ZeRO or bfloat16: shares its groups with the inner optimizer
        schedule.base_lrs = [settings.learning_rate] * len(self._optimizer.param_groups)
        schedule._last_lr = [settings.learning_rate * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        for group, rate in zip(self._optimizer.param_groups, schedule._last_lr, strict=True):
            group |= {
                "lr": rate,
                "initial_lr": settings.learning_rate,
                "weight_decay": settings.weight_decay,
            }
        if hasattr(wrapper, "clip_grad"):
            wrapper.clip_grad = settings.max_grad_norm

    def save_model(self, directory: str) -> None:
        """Writes a Hugging Face directory; all ranks call it."""
        self.release_gathered()
        export(self.model, directory)


def is_maximum(name: str) -> bool:
    """Whether the largest part of a stat is kept, instead of the sum."""
    return name.endswith("_max")


def add_stat(stats: dict[str, Any], name: str, value: Any) -> None:
    """Combines a part of a stat (a number, or a 0-dim tensor) with those before it; NaN stays NaN."""
    if name not in stats:
        stats[name] = value
    elif is_maximum(name):
        stats[name] = torch.maximum(torch.as_tensor(stats[name]), torch.as_tensor(value))
        if not isinstance(value, Tensor):
            stats[name] = stats[name].item()
    else:
        stats[name] = stats[name] + value


def _dummy_batch() -> TrainBatch:
    one = torch.ones(1, dtype=torch.long)
    return TrainBatch(
        tokens=torch.zeros(DUMMY_TOKENS, dtype=torch.long),
        prompt_lengths=one,
        completion_lengths=one,
        truncated=torch.zeros(1, dtype=torch.bool),
        versions=torch.zeros(1, dtype=torch.int32),
    )


def _zero_loss(output: Any) -> Tensor:
    """Zero, but connected to the whole graph: every rank must run the same backward collectives."""
    tensor = output[0] if isinstance(output, tuple) else output
    return tensor.sum() * 0.0


def _poison(output: Any, loss: Tensor) -> Tensor:
    """A term of the loss with zero gradient if ``loss`` is finite. Otherwise its gradient is NaN in all of the model's
    output, and DeepSpeed, which checks the gradient's norm over all ranks, does not step. Does not wait."""
    return _zero_loss(output) * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
