"""The checks that a run makes on itself, set in the section ``checks`` of its configuration."""
