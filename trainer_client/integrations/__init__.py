"""Plugs for trainers that people already have: `trl` for TRL, `verl` for verl; `rollouts` is what they share.

Each package needs its trainer installed, and nothing else imports it.
"""
