"""Episodes: the processes that run environments, and who runs which episode."""
