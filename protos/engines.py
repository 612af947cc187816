"""The kinds of engines, by whose API a server speaks: the words that relays and the gateway share."""

from __future__ import annotations

ENGINE_KINDS = {
    "vllm": "vLLM, its OpenAI server in development mode",
    "sglang": "SGLang, its own API",
    "embedded": "`gateway engine`, which speaks vLLM's API",
}
