"""Reinforcement-learning environments that need of a model only an OpenAI-compatible base URL.

`environment.py` is the protocol; `environments/` holds those that come with it; `runner.py` rolls them out.
Of this project it imports only how others' text is printed, so it works with any server that speaks the OpenAI API.
"""
