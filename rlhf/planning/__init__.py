"""What is known about a run before anything is loaded: placement, memory, the minimum cost of a step. No torch."""
