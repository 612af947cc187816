"""Text and messages to token ids and back: the only room that uses a tokenizer. No torch, no transformers."""

from gateway.tokens.answers import AnswerParser
from gateway.tokens.bridge import Bridged
from gateway.tokens.codec import Codec
from gateway.tokens.reasoning import ReasoningParser
from gateway.tokens.stream import Detokenizer
from gateway.tokens.toolcalls import ToolCall, ToolCallParser
from gateway.tokens.toolformats import ToolFormat

__all__ = [
    "AnswerParser",
    "Bridged",
    "Codec",
    "Detokenizer",
    "ReasoningParser",
    "ToolCall",
    "ToolCallParser",
    "ToolFormat",
]
