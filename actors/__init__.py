"""The Ray rim: actors, their placement, and what moves between them. The method lives in ``rlhf``."""
