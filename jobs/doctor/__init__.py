"""`rlhf doctor`: looks at the machines before a run does, and says what would help."""
