"""What a run watches itself for, by the section ``checks`` of its configuration."""
