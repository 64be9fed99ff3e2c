"""How much GPU memory each role needs: arithmetic from its settings and the model's shape.

Weights, gradients and optimiser state follow DeepSpeed's bookkeeping. Activations are counted from the tensors that the
backward pass of a Llama-shaped layer needs. Fitted to measurements instead (benchmarks/RESULTS.md): what a compiled
layer keeps, the fixed costs of the engine and of each process, and the allocator's slack.
"""

from dataclasses import dataclass

from rlhf.config import LearnerConfig, LoraConfig, Offload
from rlhf.planning.shapes import ModelShape

GIB = 2**30
AUTO_SHARE = 0.9  # automatic decisions fill at most this share of a GPU: predictions are off by up to 10 %
CONTEXT_BYTES = 0.75 * GIB  # fitted: CUDA context, NCCL and cuBLAS workspaces of one process
ALLOCATOR_SLACK = 0.08  # fitted: memory reserved beyond allocated, as a share of temporary allocations
ENGINE_BYTES = 2.0 * GIB  # fitted: vLLM's activations, within rollout.gpu_memory_fraction
CACHE_SLACK = 1.1  # partly filled blocks, and a reserved one
GRAPH_BYTES = 1.5 * GIB  # fitted: vLLM's CUDA graphs, on top of rollout.gpu_memory_fraction
ASLEEP_BYTES = 2.0 * GIB  # fitted: what a sleeping vLLM keeps
RING_BUCKETS = 2  # a publish's buckets: one is filled while the other is sent (NUM_SLOTS of actors.weights.channel)
REDUCE_BUCKET_ELEMENTS = 5e8  # DeepSpeed's reduce_bucket_size
ALL_LAYERS = 10**6  # more than any model has
NF4_BYTES = 0.5 + 4 / 64  # of a weight in four bits: its code, and its part of a float32 scale for 64
LIVE_ELEMENTS = 1e9  # DeepSpeed's stage3_max_live_parameters and sub_group_size


@dataclass(frozen=True)
class RoleMemory:
    """Predicted bytes of one rank, by use."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    training: float = 0.0  # temporary, in an optimiser step: activations, LM head, the step's own copies
    scoring: float = 0.0  # temporary, in a forward without gradients
    kv_cache: float = 0.0
    other: float = CONTEXT_BYTES
    offload: Offload = "none"
    host: float = 0.0  # of host memory, for what is offloaded
    float32_gradients: bool = False  # gradients are summed in float32
    zero_stage: int = 0

    @property
    def allocated(self) -> float:
        """Peak bytes of its tensors, as torch.cuda.max_memory_allocated counts."""
        return self.weights + self.gradients + self.optimizer + max(self.training, self.scoring)

    @property
    def idle(self) -> float:
        """Bytes held between calls, with the allocator's cache released."""
        optimizer = 0.0 if self.offload == "idle" else self.optimizer
        return self.weights + self.gradients + optimizer + self.kv_cache + self.other

    @property
    def passing(self) -> float:
        """Bytes that a forward without gradients takes in addition."""
        return (1 + ALLOCATOR_SLACK) * self.scoring

    @property
    def scores(self) -> float:
        """Bytes held while it runs forwards."""
        return self.idle + self.passing

    @property
    def peak(self) -> float:
        """The most bytes of its GPU that it ever takes."""
        held = self.weights + self.gradients + self.optimizer + self.kv_cache + self.other
        return held + (1 + ALLOCATOR_SLACK) * max(self.training, self.scoring)

    @property
    def working(self) -> float:
        """Bytes by which its peak exceeds what it holds between calls."""
        return self.peak - self.idle


def kept_by_layer(shape: ModelShape, *, compiled: bool, element_bytes: int) -> float:
    """Bytes per token that one layer's forward keeps for its backward.

    Eager: each norm keeps its input in float32, its normalised input and its output; attention keeps queries, keys,
    values, its output and one float32 per head; the MLP keeps gate, activated gate, up and their product. Compiled, a
    norm's internals, the activated gate and the product are recomputed (fitted: counting only the rest matches the
    measured peaks).
    """
    h, i, attention = shape.hidden_size, shape.intermediate_size, 2 * (shape.attention_size + shape.kv_size)
    if compiled:
        return element_bytes * (2 * h + attention + 3 * i) + 4 * shape.num_heads
    return 2 * h * (4 + 2 * element_bytes) + element_bytes * (attention + 4 * i) + 4 * shape.num_heads


def forward_bytes(shape: ModelShape, *, tokens: int, chunk: int, lm_head: bool, element_bytes: int) -> float:
    """Bytes reserved by a forward without gradients: one layer's tensors, and a chunk's logits."""
    layer = tokens * kept_by_layer(shape, compiled=False, element_bytes=element_bytes)
    return layer + (min(chunk, tokens) * shape.vocab_size * element_bytes if lm_head else 0.0)


def training_bytes(
    shape: ModelShape,
    *,
    tokens: int,
    chunk: int,
    lm_head: bool,
    checkpointed_layers: int,
    compiled: bool,
    element_bytes: int = 2,
    frozen_head: bool = False,
) -> float:
    """Peak bytes between the start of a forward and the end of its backward, gradients not counted.

    What all layers keep (checkpointed ones only their inputs), plus the larger of two parts of the backward: the LM
    head (logits of one chunk and their gradient; unless it is frozen, its weight's gradient in float32, one product,
    one cast), or one layer (the MLP's gradients; if all are checkpointed also what the recomputed layer keeps:
    otherwise the layers after it have freed more than that).
    """
    layer = tokens * kept_by_layer(shape, compiled=compiled, element_bytes=element_bytes)
    mlp_gradients = 3 * tokens * shape.intermediate_size * element_bytes
    head = 0.0
    if lm_head:
        logits = min(chunk, tokens) * shape.vocab_size * element_bytes
        head = 2 * logits + (0 if frozen_head else shape.embedding_parameters * (4 + 2 * element_bytes))
    ends = tokens * shape.hidden_size * (4 + 4 * element_bytes)  # final norm, and predicting hidden states
    checkpointed = min(checkpointed_layers, shape.num_layers)
    kept = (shape.num_layers - checkpointed) * layer + checkpointed * tokens * shape.hidden_size * element_bytes
    recomputed = layer if checkpointed == shape.num_layers else 0.0
    return kept + ends + max(head, recomputed + mlp_gradients)


def learner_memory(
    config: LearnerConfig,
    shape: ModelShape,
    *,
    checkpointed_layers: int,
    tokens: int | None = None,
    lm_head: bool = True,
    element_bytes: int = 2,
    bucket_bytes: int = 0,
    float32_gradients: bool = False,
    on_base: bool = False,
) -> RoleMemory:
    """One rank of a model that learns. ``tokens``: size of its fullest micro-batch; None: the whole budget.

    ``bucket_bytes``: size of the buckets in which it publishes its weights; 0: it does not publish.
    Per parameter: weights and gradients of ``element_bytes``, float32 master and two moments (12 bytes); stages 1, 2
    and 3 successively shard optimiser state, gradients and weights over the ranks. ZeRO-3 adds the gathered weights in
    use, every stage but 0 a reduce bucket. ``float32_gradients``: they take 4 bytes each; at stage 1 they are one
    tensor, which needs no bucket. With ``config.lora`` only adapters have gradients and optimiser state, and what is
    published merged is so in float32, one tensor at a time. Where the CPU computes the optimizer's steps, it has their
    state, and at stage 3 the gradients too. A base in 4 bits is dense one layer at a time. ``on_base``:
    its frozen weights, and its process, are those of another model.
    """
    assert config.zero_stage is not None, "it is decided"
    count, ranks, stage = shape.parameters(lm_head=lm_head), config.num_ranks, config.zero_stage
    trained = shape.adapter_parameters(config.lora) if config.lora else count
    count += trained if config.lora else 0
    in_4_bits = config.lora is not None and config.lora.load_in_4bit
    dense = shape.largest_linear_layer * element_bytes if in_4_bits else 0
    tokens = tokens or config.micro_batch_tokens
    gathered = min(count, LIVE_ELEMENTS) * element_bytes if stage == 3 else 0.0
    widened = float32_gradients and element_bytes < 4
    gradient_bytes = 4 if widened else element_bytes
    bucket = 0.0 if stage == 0 or (stage == 1 and widened) else REDUCE_BUCKET_ELEMENTS * element_bytes
    shard = trained / ranks if stage > 0 else trained
    chunk = config.logits_chunk_tokens
    passing = training_bytes(
        shape,
        tokens=tokens,
        chunk=chunk,
        lm_head=lm_head,
        checkpointed_layers=checkpointed_layers,
        compiled=config.compile is not False,
        element_bytes=element_bytes,
        frozen_head=config.lora is not None,
    )
    weights = count * element_bytes / (ranks if stage == 3 else 1)
    weights -= _saved_by_4_bits(shape, element_bytes) if in_4_bits else 0
    gradients = trained * gradient_bytes / (ranks if stage >= 2 else 1)
    state = 12.0 * shard
    in_host = {"none": 0.0, "idle": state, "optimizer": state + gradients, "all": state + gradients + weights}
    publishing = publish_bytes(config, shape, bucket_bytes=bucket_bytes, element_bytes=element_bytes)
    return RoleMemory(
        weights=trained * element_bytes if on_base else gathered + (0.0 if config.offload == "all" else weights),
        gradients=bucket + (0.0 if config.cpu_optimizer and stage == 3 else gradients),
        optimizer=0.0 if config.cpu_optimizer else state,
        training=max(passing + dense, _step_bytes(config, shard, widened=widened, element_bytes=element_bytes)),
        scoring=forward_bytes(shape, tokens=tokens, chunk=chunk, lm_head=lm_head, element_bytes=element_bytes) + dense,
        other=0.0 if on_base else CONTEXT_BYTES + publishing,
        offload=config.offload or "none",
        host=in_host[config.offload or "none"],
        float32_gradients=gradient_bytes == 4,
        zero_stage=stage,
    )


def _step_bytes(config: LearnerConfig, shard: float, *, widened: bool, element_bytes: int) -> float:
    """Bytes an optimiser step copies: its ``shard`` of the gradients into one float32 tensor, through a flat copy."""
    if config.cpu_optimizer:
        return 0.0
    copies = (4 if config.zero_stage == 3 else 0) if widened else 4 + element_bytes
    return copies * min(shard, LIVE_ELEMENTS)


def publish_bytes(config: LearnerConfig, shape: ModelShape, *, bucket_bytes: int, element_bytes: int = 2) -> int:
    """Bytes a publish holds on the sending rank; 0 if ``bucket_bytes`` is 0.

    The ring of buckets, kept from the first publish on. If the weights are sharded, also the whole tensors of one
    bucket: a tensor split over several buckets is gathered once, so at least the largest tensor.
    """
    if not bucket_bytes:
        return 0
    sharded = config.zero_stage == 3 and config.num_ranks > 1
    gathered = max(bucket_bytes, shape.largest_tensor * element_bytes) if sharded else 0
    if config.lora:
        dense = element_bytes if config.lora.load_in_4bit else 0  # the weight, where it is in 4 bits
        # merged: a weight and its sum with the adapter in float32, and the rounded sum
        merged = 0 if config.adapter_apart else 8 + element_bytes
        gathered = shape.largest_linear_layer * (merged + dense)
    return RING_BUCKETS * bucket_bytes + gathered


def _saved_by_4_bits(shape: ModelShape, element_bytes: int) -> float:
    """Bytes by which a model is smaller with its layers' matrices in 4 bits."""
    return shape.matrix_parameters * (element_bytes - NF4_BYTES)


def frozen_memory(
    shape: ModelShape, *, tokens: int, chunk: int = 0, lm_head: bool, element_bytes: int = 2
) -> RoleMemory:
    """One replica of a model that only scores."""
    return RoleMemory(
        weights=shape.parameters(lm_head=lm_head) * element_bytes,
        scoring=forward_bytes(shape, tokens=tokens, chunk=chunk, lm_head=lm_head, element_bytes=element_bytes),
    )


def rollout_memory(
    shape: ModelShape,
    *,
    budget_bytes: float,
    tensor_parallel_size: int,
    element_bytes: int = 2,
    cache_tokens: int | None = None,
    adapter: LoraConfig | None = None,
) -> RoleMemory:
    """One process of an awake vLLM engine.

    The KV cache is the rest of ``budget_bytes``, and may be negative; it is at most what ``cache_tokens`` need. An
    adapter beside the weights is there twice, as it arrived and where it is computed.
    """
    weights = shape.parameters(lm_head=True) * element_bytes / tensor_parallel_size
    weights += 2 * shape.adapter_parameters(adapter) * element_bytes if adapter else 0
    cache = budget_bytes - weights - ENGINE_BYTES
    if cache_tokens is not None:
        cache = min(cache, CACHE_SLACK * cache_tokens * kv_token_bytes(shape, tensor_parallel_size, element_bytes))
    return RoleMemory(weights=weights, kv_cache=cache, other=ENGINE_BYTES + GRAPH_BYTES)


def kv_token_bytes(shape: ModelShape, tensor_parallel_size: int, element_bytes: int = 2) -> float:
    """Bytes of one token's keys and values on one GPU."""
    return 2 * shape.num_layers * shape.kv_size * element_bytes / min(tensor_parallel_size, shape.num_kv_heads)
