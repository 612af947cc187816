"""Turns: running ones, their driver, transcript and audience, and those that a retry may join.

Other rooms enter by `RunningTurn` and `JoinableTurns`.
"""
