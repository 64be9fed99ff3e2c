"""What is known of a run before anything is loaded: who sits where, what fits, what a step must cost. No torch."""
