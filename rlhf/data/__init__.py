"""Prompts and preference pairs: read, tokenised, and drawn in order. Imports neither rewards nor models."""
