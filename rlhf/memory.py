"""How much GPU memory each role takes: arithmetic from its settings and the model's shape.

Weights, gradients and optimiser state follow DeepSpeed's bookkeeping. Activations are counted from the tensors that the
backward pass of a Llama-shaped layer keeps. Fitted to measurements instead (benchmarks/RESULTS.md): what a compiled
layer keeps, the engine's and the processes' fixed costs, and the allocator's slack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.config import LearnerConfig, model_shape

GIB = 2**30
CONTEXT_BYTES = 0.75 * GIB  # fitted: CUDA context, NCCL and cuBLAS workspaces of one process
ALLOCATOR_SLACK = 0.08  # fitted: reserved beyond allocated, as a share of what comes and goes
ENGINE_BYTES = 2.0 * GIB  # fitted: vLLM's activations, inside rollout.gpu_memory_fraction
CACHE_SLACK = 1.1  # blocks that are not full, and a reserved one
GRAPH_BYTES = 1.5 * GIB  # fitted: vLLM's CUDA graphs, beyond rollout.gpu_memory_fraction
ASLEEP_BYTES = 2.0 * GIB  # fitted: what a sleeping vLLM keeps
BUCKETS_ALIVE = 3  # weight buckets of a publish: one being gathered, one in flight, one cached
REDUCE_BUCKET_ELEMENTS = 5e8  # DeepSpeed's reduce_bucket_size
LIVE_ELEMENTS = 1e9  # DeepSpeed's stage3_max_live_parameters and sub_group_size


@dataclass(frozen=True)
class ModelSizes:
    """What memory follows from."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    attention: int  # heads x head width
    num_kv_heads: int
    kv: int  # key-value heads x head width
    vocab: int
    tied: bool

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding, and of the LM head."""
        return self.vocab * self.hidden

    @property
    def body(self) -> int:
        """Parameters of the layers' matrices and norms."""
        matrices = 2 * self.hidden * (self.attention + self.kv) + 3 * self.hidden * self.intermediate
        return self.num_layers * (matrices + 2 * self.hidden)

    def parameters(self, *, lm_head: bool) -> int:
        """All parameters of a causal LM, or of the same backbone under a scalar head."""
        return self.body + self.embedding * (2 if lm_head and not self.tied else 1)


def sizes_of(shape: Mapping[str, Any]) -> ModelSizes | None:
    """The sizes in a ``config.json``; None where it does not describe a dense Llama-shaped model."""
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if any(not isinstance(shape.get(key), int) for key in needed):
        return None
    heads = shape["num_attention_heads"]
    kv_heads = shape.get("num_key_value_heads") or heads
    width = shape.get("head_dim") or shape["hidden_size"] // heads
    return ModelSizes(
        num_layers=shape["num_hidden_layers"],
        hidden=shape["hidden_size"],
        intermediate=shape["intermediate_size"],
        num_heads=heads,
        attention=heads * width,
        num_kv_heads=kv_heads,
        kv=kv_heads * width,
        vocab=shape["vocab_size"],
        tied=bool(shape.get("tie_word_embeddings", False)),
    )


def read_sizes(path: str) -> ModelSizes | None:
    """The sizes of a local model directory, or of a hub model whose ``config.json`` is cached; None for others."""
    shape = model_shape(path)
    if shape is None:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            return None
        shape = model_shape(cached.removesuffix("config.json")) if isinstance(cached, str) else None
    return sizes_of(shape) if shape is not None else None


@dataclass(frozen=True)
class RoleMemory:
    """Predicted bytes of one rank, by what holds them."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    training: float = 0.0  # comes and goes in an optimiser step: activations, LM head, the step's own copies
    scoring: float = 0.0  # comes and goes in a forward without gradients
    kv_cache: float = 0.0
    other: float = CONTEXT_BYTES
    offloads: bool = False  # its optimiser state waits in host memory between updates

    @property
    def allocated(self) -> float:
        """The most at once in the process's tensors, as torch.cuda.max_memory_allocated counts."""
        return self.weights + self.gradients + self.optimizer + max(self.training, self.scoring)

    @property
    def idle(self) -> float:
        """Between its calls, with the allocator's cache given back."""
        return self.weights + self.gradients + (0.0 if self.offloads else self.optimizer) + self.kv_cache + self.other

    @property
    def scores(self) -> float:
        """While it runs forwards."""
        return self.idle + (1 + ALLOCATOR_SLACK) * self.scoring

    @property
    def peak(self) -> float:
        """The most that it takes from its GPU at any time."""
        held = self.weights + self.gradients + self.optimizer + self.kv_cache + self.other
        return held + (1 + ALLOCATOR_SLACK) * max(self.training, self.scoring)


def kept_by_layer(sizes: ModelSizes, *, compiled: bool, element_bytes: int) -> float:
    """Bytes per token that one layer's forward keeps for its backward.

    Eager: each norm keeps its input in float32, its normalised input and its output; attention keeps queries, keys and
    values (expanded to all heads), its output and one float32 per head; the MLP keeps gate, activated gate, up and
    their product. Compiled, a norm's internals, the activated gate and the product are recomputed (fitted: the count of
    what is then left meets the measured peaks).
    """
    h, a, i = sizes.hidden, sizes.attention, sizes.intermediate
    if compiled:
        return element_bytes * (2 * h + 4 * a + 3 * i) + 4 * sizes.num_heads
    return 2 * h * (4 + 2 * element_bytes) + element_bytes * (4 * a + 4 * i) + 4 * sizes.num_heads


def forward_bytes(sizes: ModelSizes, *, tokens: int, chunk: int, lm_head: bool, element_bytes: int) -> float:
    """What a forward without gradients makes the allocator reserve: one layer's tensors, and a chunk's logits."""
    layer = tokens * kept_by_layer(sizes, compiled=False, element_bytes=element_bytes)
    return layer + (min(chunk, tokens) * sizes.vocab * element_bytes if lm_head else 0.0)


def training_bytes(
    sizes: ModelSizes,
    *,
    tokens: int,
    chunk: int,
    lm_head: bool,
    checkpointing: bool,
    compiled: bool,
    element_bytes: int = 2,
) -> float:
    """The most at once between the start of a forward and the end of its backward, gradients not counted.

    Kept by all layers (with checkpointing only their inputs), plus the larger of what follows them in backward: the LM
    head (logits and their gradient of one chunk; its weight's gradient in float32, one product, one cast), or one layer
    (the MLP's gradients; with checkpointing also what the layer keeps while it is recomputed).
    """
    layer = tokens * kept_by_layer(sizes, compiled=compiled, element_bytes=element_bytes)
    mlp_gradients = 3 * tokens * sizes.intermediate * element_bytes
    head = 0.0
    if lm_head:
        head = 2 * min(chunk, tokens) * sizes.vocab * element_bytes + sizes.embedding * (4 + 2 * element_bytes)
    ends = tokens * sizes.hidden * (4 + 4 * element_bytes)  # final norm, and the hidden states that predict
    if checkpointing:
        inputs = sizes.num_layers * tokens * sizes.hidden * element_bytes
        return inputs + ends + max(head, layer + mlp_gradients)
    return sizes.num_layers * layer + ends + max(head, mlp_gradients)


def learner_memory(
    config: LearnerConfig,
    sizes: ModelSizes,
    *,
    checkpointing: bool,
    tokens: int | None = None,
    lm_head: bool = True,
    element_bytes: int = 2,
    bucket_bytes: float = 0.0,
    offloads: bool = False,
) -> RoleMemory:
    """One rank of a model that learns. ``tokens``: of its fullest micro-batch; None: the whole budget.

    Per parameter: weights and gradients of ``element_bytes``, float32 master and two moments (12 bytes); stages 1, 2
    and 3 spread optimiser state, gradients and weights over the ranks. ZeRO-3 adds the gathered weights in use, every
    stage but 0 a reduce bucket.
    """
    count, ranks, stage = sizes.parameters(lm_head=lm_head), config.num_ranks, config.zero_stage
    tokens = tokens or config.micro_batch_tokens
    gathered = min(count, LIVE_ELEMENTS) * element_bytes if stage == 3 else 0.0
    bucket = REDUCE_BUCKET_ELEMENTS * element_bytes if stage > 0 else 0.0
    shard = count / ranks if stage > 0 else count
    # the step turns its shard of the gradients into one float32 tensor, through a flat copy
    stepping = 0.0 if config.offload_optimizer else (4 + element_bytes) * min(shard, LIVE_ELEMENTS)
    chunk = config.logits_chunk_tokens
    passing = training_bytes(
        sizes,
        tokens=tokens,
        chunk=chunk,
        lm_head=lm_head,
        checkpointing=checkpointing,
        compiled=config.compile,
        element_bytes=element_bytes,
    )
    return RoleMemory(
        weights=count * element_bytes / (ranks if stage == 3 else 1) + gathered,
        gradients=count * element_bytes / (ranks if stage >= 2 else 1) + bucket,
        optimizer=0.0 if config.offload_optimizer else 12.0 * shard,
        training=max(passing, stepping),
        scoring=forward_bytes(sizes, tokens=tokens, chunk=chunk, lm_head=lm_head, element_bytes=element_bytes),
        other=CONTEXT_BYTES + BUCKETS_ALIVE * bucket_bytes,
        offloads=offloads,
    )


def frozen_memory(
    sizes: ModelSizes, *, tokens: int, chunk: int = 0, lm_head: bool, element_bytes: int = 2
) -> RoleMemory:
    """One replica of a model that only scores."""
    return RoleMemory(
        weights=sizes.parameters(lm_head=lm_head) * element_bytes,
        scoring=forward_bytes(sizes, tokens=tokens, chunk=chunk, lm_head=lm_head, element_bytes=element_bytes),
    )


def rollout_memory(
    sizes: ModelSizes,
    *,
    budget_bytes: float,
    tensor_parallel_size: int,
    element_bytes: int = 2,
    cache_tokens: int | None = None,
) -> RoleMemory:
    """One process of an awake vLLM engine.

    The KV cache is what ``budget_bytes`` leaves, and may come out negative; it is no more than ``cache_tokens`` need.
    """
    weights = sizes.parameters(lm_head=True) * element_bytes / tensor_parallel_size
    cache = budget_bytes - weights - ENGINE_BYTES
    if cache_tokens is not None:
        cache = min(cache, CACHE_SLACK * cache_tokens * kv_token_bytes(sizes, tensor_parallel_size, element_bytes))
    return RoleMemory(weights=weights, kv_cache=cache, other=ENGINE_BYTES + GRAPH_BYTES)


def kv_token_bytes(sizes: ModelSizes, tensor_parallel_size: int, element_bytes: int = 2) -> float:
    """Bytes of one token's keys and values on one GPU."""
    return 2 * sizes.num_layers * sizes.kv * element_bytes / min(tensor_parallel_size, sizes.num_kv_heads)
