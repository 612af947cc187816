"""Reinforcement-learning environments that know a model only as an OpenAI-compatible base_url.

`environment.py` is the protocol; `environments/` holds the two that come with it; `runner.py` rolls them out.
Imports nothing else of this project: whatever speaks the OpenAI API can be driven.
"""
