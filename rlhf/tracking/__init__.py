"""What a run records: metrics per step, progress on the terminal, sampled completions, the final summary."""

from rlhf.tracking.metrics import rollout_metrics, source_metrics
from rlhf.tracking.performance import Roofline
from rlhf.tracking.summary import print_summary, write_summary
from rlhf.tracking.tracker import Tracker

__all__ = ["Roofline", "Tracker", "print_summary", "rollout_metrics", "source_metrics", "write_summary"]
