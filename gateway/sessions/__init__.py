"""Sessions: the registry of live ones, their turns, endings, groups, admission, and recovery after a restart.

HTTP handlers enter by `TurnService`, `Endings` and `GroupService`.
"""
