"""Text and messages to token ids and back: the only room that uses a tokenizer. No torch, no transformers."""

from gateway.tokens.bridge import Bridged
from gateway.tokens.codec import Codec
from gateway.tokens.reasoning import ReasoningParser
from gateway.tokens.stream import StreamDecoder, TextDelta
from gateway.tokens.toolcalls import ToolCall, ToolCallParser
from gateway.tokens.toolformats import ToolFormat

__all__ = [
    "Bridged",
    "Codec",
    "ReasoningParser",
    "StreamDecoder",
    "TextDelta",
    "ToolCall",
    "ToolCallParser",
    "ToolFormat",
]
