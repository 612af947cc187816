"""Decisions of the relay tier: pure functions and the states they own. No I/O, no clock."""
