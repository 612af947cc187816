"""Turns: running, driven over engines, recorded, joined by retries."""
