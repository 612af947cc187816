"""Asks xgrammar, in vLLM's environment, about structural tags: whether texts are whole answers, and for answers itself.

stdin: [{"tag": JSON text, "texts": [...]}]; stdout: [{"accepted": [bool], "walks": [text]}], for each tag.
"""

from __future__ import annotations

import json
import random
import sys

import xgrammar

END = 256
WALKS, STEPS_MAX = 20, 600
CLOSINGS = ("\n</parameter>", "</parameter>", "</arg_value>", "</think>", "[/THINK]")
"""What ends text of any kind, and would hardly be drawn byte by byte."""


def matcher(compiler: xgrammar.GrammarCompiler, tag: str) -> xgrammar.GrammarMatcher:
    return xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))


def accepts(found: xgrammar.GrammarMatcher, text: str) -> bool:
    return all(found.accept_token(byte) for byte in text.encode()) and found.accept_token(END)


def fed(found: xgrammar.GrammarMatcher, text: str) -> bytes:
    """`text`, if the grammar allows all of it here; else nothing, and the matcher is as before."""
    for number, byte in enumerate(text.encode()):
        if not found.accept_token(byte):
            found.rollback(number)
            return b""
    return text.encode()


def walk(found: xgrammar.GrammarMatcher, rng: random.Random) -> str | None:
    """An answer that the grammar allows, drawn byte by byte; None for one that went on for too long."""
    mask, written = xgrammar.allocate_token_bitmask(1, END + 1), bytearray()
    for _ in range(STEPS_MAX):
        if rng.random() < 0.3 and (closed := fed(found, rng.choice(CLOSINGS))):
            written += closed
        found.fill_next_token_bitmask(mask)
        allowed = [byte for byte in range(END + 1) if int(mask[0][byte // 32]) >> (byte % 32) & 1]
        closing = [byte for byte in allowed if byte == END or chr(byte) in '"<}],0123456789']
        choices = closing if closing and rng.random() < 0.7 else [b for b in allowed if 32 <= b < 127 or b in (10, END)]
        byte = rng.choice(choices or allowed)
        assert found.accept_token(byte)
        if byte == END:
            return written.decode()
        written.append(byte)
    return None


def main() -> None:
    vocabulary = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    compiler, rng, answers = xgrammar.GrammarCompiler(info), random.Random(7), []
    for asked in json.load(sys.stdin):
        walks = [walk(matcher(compiler, asked["tag"]), rng) for _ in range(WALKS)]
        accepted = [accepts(matcher(compiler, asked["tag"]), text) for text in asked["texts"]]
        answers.append({"accepted": accepted, "walks": [text for text in walks if text is not None]})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
