"""A storm of failures over a run as a user starts it, whose numbers must be those of a run in calm weather."""
