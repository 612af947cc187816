"""The embedded engine: continuous batching, and vLLM's dialect over HTTP."""
