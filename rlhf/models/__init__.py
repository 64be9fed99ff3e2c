"""Models as they run here: over packed sequences, with attention of our own, checked against transformers."""
