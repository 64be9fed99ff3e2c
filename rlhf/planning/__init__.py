"""What is known of a run before anything is loaded: who sits where, what fits, and what a step must cost."""
