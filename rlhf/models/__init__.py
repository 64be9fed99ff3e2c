"""Models over packed sequences, with our own attention, checked against transformers."""
