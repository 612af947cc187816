"""Plugs for trainers that people already have: `trl` for TRL; `rollouts` is what they share.

Each module needs its trainer installed, and nothing else imports it.
"""
