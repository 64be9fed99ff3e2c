"""What TRL, verl and OpenRLHF call the keys of this project, for those who type them here.

A name is a whole key, as verl writes it, or its last part. Each has the key here, and what its value means if that
differs. Names that differ only in their section need no line: ``rlhf.recipes`` finds those.
"""

from typing import NamedTuple


class Alias(NamedTuple):
    """A key of ours, and what to know about its value."""

    key: str
    meaning: str = ""


PROMPTS = "counts prompts, of all ranks together; each gets algorithm.group_size completions"
TOKENS = "a budget of tokens per rank, which bounds memory and changes nothing that is learnt"
MINIBATCHES = "counts optimiser steps per epoch over a step's prompts_per_step x group_size completions"
STEPS = "counts training steps; there are no epochs over the data, which starts again when it ends"
WARMUP = "counts optimiser steps"
KL = "the KL to the reference: in the loss with grpo and reinforce_pp, in the reward with rloo and ppo; 0: none"
PATH = "a Hugging Face directory or hub id"
DATA = "a .jsonl, .csv or .parquet file, a directory saved by datasets, or task:NAME"
FUNCTIONS = "a list, for example [{path: my_rewards.py:f, weight: 1.0}]"
REWARD_MODEL = "a mapping, for example reward.model.path=DIRECTORY"
RANKS = "counts GPUs, of all nodes together"
COLOCATE = "colocate: learner, reference and vLLM share GPUs"
LOGGER = "TensorBoard is on by default (tracking.tensorboard); W&B gets this project"
CHECKPOINTS = "counts training steps; null: every ten minutes"
OFFLOAD = "optimizer: as there; null: what the memory plan needs"
LAYERS = "counts decoder layers; null: as few as memory needs"

ALIASES: dict[str, Alias] = {
    # TRL
    "model_name_or_path": Alias("model.path", PATH),
    "sft_model_path": Alias("model.path", PATH),
    "dataset_name": Alias("data.train", DATA),
    "train_dataset": Alias("data.train", DATA),
    "output_dir": Alias("run_dir"),
    "run_name": Alias("name"),
    "learning_rate": Alias("learner.optimizer.learning_rate"),
    "lr": Alias("learner.optimizer.learning_rate"),
    "adam_beta1": Alias("learner.optimizer.betas", "both, as [0.9, 0.95]"),
    "adam_beta2": Alias("learner.optimizer.betas", "both, as [0.9, 0.95]"),
    "adam_epsilon": Alias("learner.optimizer.eps"),
    "lr_scheduler_type": Alias("learner.optimizer.schedule"),
    "warmup_ratio": Alias("learner.optimizer.warmup_steps", WARMUP),
    "max_steps": Alias("num_steps", STEPS),
    "num_train_epochs": Alias("num_steps", STEPS),
    "total_episodes": Alias("num_steps", STEPS),
    "per_device_train_batch_size": Alias("algorithm.prompts_per_step", PROMPTS),
    "generation_batch_size": Alias("algorithm.prompts_per_step", PROMPTS),
    "gradient_accumulation_steps": Alias("learner.micro_batch_tokens", TOKENS),
    "steps_per_generation": Alias("algorithm.num_minibatches", MINIBATCHES),
    "num_mini_batches": Alias("algorithm.num_minibatches", MINIBATCHES),
    "num_generations": Alias("algorithm.group_size"),
    "rloo_k": Alias("algorithm.group_size"),
    "num_iterations": Alias("algorithm.num_epochs"),
    "num_ppo_epochs": Alias("algorithm.num_epochs"),
    "max_prompt_length": Alias("data.max_prompt_tokens"),
    "max_completion_length": Alias("rollout.max_completion_tokens"),
    "max_new_tokens": Alias("rollout.max_completion_tokens"),
    "max_tokens": Alias("rollout.max_completion_tokens"),
    "response_length": Alias("rollout.max_completion_tokens"),
    "epsilon": Alias("algorithm.epsilon_low", "the lower bound alone; algorithm.epsilon_high is the upper one"),
    "cliprange": Alias("algorithm.epsilon_low", "the lower bound alone; algorithm.epsilon_high is the upper one"),
    "cliprange_value": Alias("algorithm.value_clip"),
    "kl_coef": Alias("algorithm.beta", KL),
    "whiten_rewards": Alias("algorithm.whiten_advantages", "of ppo: advantages, not rewards, are whitened"),
    "reward_funcs": Alias("reward.functions", FUNCTIONS),
    "reward_weights": Alias("reward.functions", FUNCTIONS),
    "reward_model_path": Alias("reward.model", REWARD_MODEL),
    "vllm_mode": Alias("placement.mode", COLOCATE),
    "vllm_gpu_memory_utilization": Alias("rollout.gpu_memory_fraction"),
    "vllm_importance_sampling_correction": Alias("algorithm.rollout_correction"),
    "vllm_importance_sampling_cap": Alias("algorithm.rollout_correction_cap"),
    "vllm_tensor_parallel_size": Alias("rollout.tensor_parallel_size"),
    "gradient_checkpointing": Alias("learner.checkpointed_layers", LAYERS),
    "bf16": Alias("model.dtype", "auto: bfloat16 on a GPU, float32 on a CPU"),
    "torch_dtype": Alias("model.dtype", "auto: bfloat16 on a GPU, float32 on a CPU"),
    "save_steps": Alias("checkpoint.every_steps", CHECKPOINTS),
    "save_total_limit": Alias("checkpoint.keep"),
    "resume_from_checkpoint": Alias("checkpoint.resume", "auto, none, or a checkpoint's directory"),
    "eval_steps": Alias("eval_every_steps"),
    "report_to": Alias("tracking.wandb_project", LOGGER),
    "log_completions": Alias("tracking.completions_every_steps", "counts training steps; 0: never"),
    "num_completions_to_print": Alias("tracking.completions_rows"),
    # verl
    "train_files": Alias("data.train", DATA),
    "val_files": Alias("data.eval", DATA),
    "prompt_key": Alias("data.prompt_column"),
    "train_batch_size": Alias("algorithm.prompts_per_step", PROMPTS),
    "gen_batch_size": Alias("algorithm.prompts_per_step", PROMPTS),
    "max_response_length": Alias("rollout.max_completion_tokens"),
    "filter_overlong_prompts": Alias("data.overlong_prompts", "drop or truncate"),
    "truncation": Alias("data.overlong_prompts", "drop or truncate; truncate keeps the end"),
    "actor_rollout_ref.model.path": Alias("model.path", PATH),
    "actor_rollout_ref.rollout.n": Alias("algorithm.group_size"),
    "critic.model.path": Alias("critic.path", PATH),
    "enable_gradient_checkpointing": Alias("learner.checkpointed_layers", LAYERS),
    "ppo_mini_batch_size": Alias("algorithm.num_minibatches", MINIBATCHES),
    "ppo_micro_batch_size": Alias("learner.micro_batch_tokens", TOKENS),
    "ppo_micro_batch_size_per_gpu": Alias("learner.micro_batch_tokens", TOKENS),
    "ppo_max_token_len_per_gpu": Alias("learner.micro_batch_tokens", TOKENS),
    "ppo_epochs": Alias("algorithm.num_epochs"),
    "lr_warmup_steps": Alias("learner.optimizer.warmup_steps", WARMUP),
    "grad_clip": Alias("learner.optimizer.max_grad_norm"),
    "clip_ratio": Alias("algorithm.epsilon_low", "the lower bound alone; algorithm.epsilon_high is the upper one"),
    "clip_ratio_low": Alias("algorithm.epsilon_low"),
    "clip_ratio_high": Alias("algorithm.epsilon_high"),
    "clip_ratio_c": Alias("algorithm.dual_clip"),
    "cliprange_low": Alias("algorithm.epsilon_low"),
    "entropy_coeff": Alias("algorithm.entropy_coef"),
    "use_kl_loss": Alias("algorithm.beta", KL),
    "kl_loss_coef": Alias("algorithm.beta", KL),
    "use_kl_in_reward": Alias("algorithm.beta", KL),
    "kl_loss_type": Alias("algorithm.kl_estimator", "of ppo; the KL in grpo's loss is always k3"),
    "kl_penalty": Alias("algorithm.kl_estimator", "of ppo; the KL in grpo's loss is always k3"),
    "loss_agg_mode": Alias("algorithm.loss_type", "dapo: token-mean; grpo: seq-mean-token-mean"),
    "tensor_model_parallel_size": Alias("rollout.tensor_parallel_size"),
    "gpu_memory_utilization": Alias("rollout.gpu_memory_fraction"),
    "adv_estimator": Alias("algorithm.name", "grpo, rloo, reinforce_pp or ppo (GAE)"),
    "target_kl": Alias("algorithm.kl_target"),
    "algorithm.kl_ctrl.horizon": Alias("algorithm.kl_horizon"),
    "norm_adv_by_std_in_grpo": Alias("algorithm.scale_rewards", "group, batch or none"),
    "max_num_gen_batches": Alias("algorithm.dynamic_sampling_max_tries"),
    "filter_groups": Alias("algorithm.dynamic_sampling_max_tries", "0: off"),
    "custom_reward_function.path": Alias("reward.functions", FUNCTIONS),
    "custom_reward_function.name": Alias("reward.functions", FUNCTIONS),
    "reward_model.model.path": Alias("reward.model", REWARD_MODEL),
    "total_epochs": Alias("num_steps", STEPS),
    "total_training_steps": Alias("num_steps", STEPS),
    "n_gpus_per_node": Alias("learner.num_ranks", RANKS),
    "nnodes": Alias("learner.num_ranks", RANKS),
    "critic_warmup": Alias("critic.warmup_steps", "counts training steps"),
    "save_freq": Alias("checkpoint.every_steps", CHECKPOINTS),
    "test_freq": Alias("eval_every_steps"),
    "default_local_dir": Alias("run_dir"),
    "max_actor_ckpt_to_keep": Alias("checkpoint.keep"),
    "resume_mode": Alias("checkpoint.resume", "auto, none, or a checkpoint's directory"),
    "project_name": Alias("tracking.wandb_project", LOGGER),
    "experiment_name": Alias("name"),
    "trainer.logger": Alias("tracking.wandb_project", LOGGER),
    # OpenRLHF
    "pretrain": Alias("model.path", PATH),
    "reward_pretrain": Alias("reward.model", REWARD_MODEL),
    "critic_pretrain": Alias("critic.path", PATH),
    "prompt_data": Alias("data.train", DATA),
    "eval_dataset": Alias("data.eval", DATA),
    "input_key": Alias("data.prompt_column"),
    "apply_chat_template": Alias("data.prompt_column", "a column of chats has the template applied, one of texts not"),
    "prompt_max_len": Alias("data.max_prompt_tokens"),
    "generate_max_len": Alias("rollout.max_completion_tokens"),
    "actor_learning_rate": Alias("learner.optimizer.learning_rate"),
    "critic_learning_rate": Alias("critic.optimizer.learning_rate"),
    "lr_scheduler": Alias("learner.optimizer.schedule"),
    "lr_warmup_ratio": Alias("learner.optimizer.warmup_steps", WARMUP),
    "max_norm": Alias("learner.optimizer.max_grad_norm"),
    "l2": Alias("learner.optimizer.weight_decay"),
    "adam_betas": Alias("learner.optimizer.betas"),
    "adam_offload": Alias("learner.offload", OFFLOAD),
    "rollout_batch_size": Alias("algorithm.prompts_per_step", PROMPTS),
    "n_samples_per_prompt": Alias("algorithm.group_size"),
    "micro_train_batch_size": Alias("learner.micro_batch_tokens", TOKENS),
    "micro_rollout_batch_size": Alias("learner.micro_batch_tokens", TOKENS),
    "max_epochs": Alias("algorithm.num_epochs"),
    "num_episodes": Alias("num_steps", STEPS),
    "advantage_estimator": Alias("algorithm.name", "grpo, rloo, reinforce_pp or ppo (GAE)"),
    "init_kl_coef": Alias("algorithm.beta", KL),
    "lambd": Alias("algorithm.lam"),
    "eps_clip": Alias("algorithm.epsilon_low", "the lower bound alone; algorithm.epsilon_high is the upper one"),
    "eps_clip_low_high": Alias(
        "algorithm.epsilon_low", "the lower bound alone; algorithm.epsilon_high is the upper one"
    ),
    "dynamic_filtering": Alias("algorithm.dynamic_sampling_max_tries", "0: off"),
    "vllm_num_engines": Alias("rollout.num_workers"),
    "colocate_all_models": Alias("placement.mode", COLOCATE),
    "actor_num_gpus_per_node": Alias("learner.num_ranks", RANKS),
    "actor_num_nodes": Alias("learner.num_ranks", RANKS),
    "critic_num_gpus_per_node": Alias("critic.num_ranks", RANKS),
    "ref_num_gpus_per_node": Alias("reference.num_ranks", RANKS),
    "freezing_actor_steps": Alias("critic.warmup_steps", "counts training steps"),
    "async_queue_size": Alias("rollout.max_staleness", "counts weight versions"),
    "max_ckpt_num": Alias("checkpoint.keep"),
    "save_path": Alias("run_dir", "the trained model is in run_dir/model"),
    "ckpt_path": Alias("run_dir"),
    "load_checkpoint": Alias("checkpoint.resume", "auto, none, or a checkpoint's directory"),
    "use_wandb": Alias("tracking.wandb_project", LOGGER),
}
