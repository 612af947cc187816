"""Continuous batching: the tokens that each step computes, and the blocks of the KV pool that they need. Pure."""
