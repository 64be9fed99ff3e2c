"""What runs in a learner's process, or a frozen model's: the engine, what learns on it, the scorer, weight buckets."""
