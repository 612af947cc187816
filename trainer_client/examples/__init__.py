"""Trainers to copy: each is one file of under 100 lines that publishes to a relay. Nothing imports them."""
