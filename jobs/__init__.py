"""Entry points: the `rlhf` command, and what submits it to a cluster."""
