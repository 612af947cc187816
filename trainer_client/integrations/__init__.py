"""Plugs for trainers that people already have: `trl` for TRL, `verl` for verl, `vllm` for those that send weights by
vLLM's trainer side, `prime_rl` for prime-rl; `rollouts` is what they share.

Each but `prime_rl`, which is a server, needs its trainer installed, and nothing else imports it.
"""
