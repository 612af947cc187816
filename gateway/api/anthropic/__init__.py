"""Anthropic's Messages API: its bodies, put into a chat's, and the form of its answers."""
