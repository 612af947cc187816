"""A tokenizer of three words, for gateways whose tests speak in token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models


def tokenizer(directory: Path) -> Path:
    """A directory that the gateway takes for a model's: a tokenizer of three words."""
    directory.mkdir(exist_ok=True)
    words = {"<unk>": 0, "hello": 1, "</s>": 2}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"vocab_size": 1024}')
    return directory
