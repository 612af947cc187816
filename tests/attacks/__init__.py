"""Attempts on a gateway with keys, and what it answers: `python -m tests.attacks` writes them to docs/reference/attacks.md."""
