"""Fuzzers of every port and file that takes what strangers write: kept cases first, then seeded mutations of them.

`corpus/KIND.json` keeps the cases of a kind: whole and valid ones to begin from, and each one that has shown a fault.
"""
