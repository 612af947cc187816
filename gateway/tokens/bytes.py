"""What each token id says, as bytes.

A byte-level vocabulary (GPT-2's alphabet: Llama 3, Qwen2, SmolLM2, ...) is a table: the text of a run of tokens is the
join of their bytes, read as UTF-8. Nothing need be decoded twice, so a token costs one list access. Other vocabularies
(SentencePiece: metaspace, byte fallback) depend on their neighbours and take `tokenizers` and a window.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import Tokenizer


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return table


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder is plain ByteLevel, alone or in a sequence of one."""
    decoder: dict[str, Any] = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") == "ByteLevel"


def lone_token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What one token of a SentencePiece-like vocabulary says inside a text: a byte-fallback token its byte."""
    token = tokenizer.id_to_token(token_id) or ""
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Bytes by token id; ids without a token say nothing. Right for byte-level vocabularies only."""
    alphabet = byte_level_alphabet()
    table = [b""] * size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            table[token_id] = bytes([alphabet[character] for character in token])
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            table[token_id] = token.encode()
    return table
