"""What the tests of trainers' plugs share: a fleet of real processes, and importance ratios of what it sampled.

A trainer's own program runs in the trainer's environment, and imports of this package `ratios` alone.
"""
