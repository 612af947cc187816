"""Decisions of the gateway: pure functions and the states they own. No I/O, no clock."""
