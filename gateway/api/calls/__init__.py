"""A model call, whichever API it came by: its session, prompt and turns, and back to an answer or a stream."""
