"""OpenAI's API: from a request's body to its session, prompt and turns, and back to an answer or a stream."""
