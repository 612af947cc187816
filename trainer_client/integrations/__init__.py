"""Plugs for trainers that people already have: `trl` for TRL, `verl` for verl, `vllm` for those that send weights by
vLLM's trainer side; `rollouts` is what they share.

Each needs its trainer installed, and nothing else imports it.
"""
