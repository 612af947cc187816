"""Which engine runs a turn, and what is said to one that has to wait."""
