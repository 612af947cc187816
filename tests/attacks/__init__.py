"""Attempts on a gateway with keys, and what it answers: `python -m tests.attacks` writes docs/reference/attacks.md."""
