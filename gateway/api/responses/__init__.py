"""OpenAI's Responses API, on the sessions, prompts and turns of the chat: its bodies and items, and its answers."""
