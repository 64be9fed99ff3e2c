"""What runs in a learner's process: the engine, what learns on it, and how its weights are split into buckets."""
