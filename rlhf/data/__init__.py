"""Prompts and preference pairs: read, tokenised, and drawn in order. Imports no rewards, models or training."""
