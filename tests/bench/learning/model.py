"""The model: a Llama of some 100,000 parameters that has seen demonstrations which stumble.

Reinforcement learning needs something to reinforce: random weights never count. So the weights come from a short
supervised training on `task.demonstration`, the same for every mode and seed.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.bench.learning import task

if TYPE_CHECKING:
    from transformers import LlamaConfig

CONTEXT = 512
STEPS, ROWS, LEARNING_RATE = 250, 8, 4e-3
SEED = 7


def kept_model(cache: Path) -> Path:
    """The model's directory in `cache`, made now if it is not there yet: some half a minute."""
    source = Path(__file__).read_bytes() + Path(task.__file__).read_bytes()  # what decides its weights
    target = cache / f"counting-{hashlib.sha256(source).hexdigest()[:12]}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".counting-", dir=cache) as scratch:
            made = write_model(Path(scratch) / "model")
            with suppress(OSError):  # another process was faster: its model is the same
                made.rename(target)
    return target


def write_model(directory: Path, steps: int = STEPS) -> Path:
    """Writes config, weights and tokenizer into `directory` (created), as `transformers` and engines load them.
    `steps`: of the warm start."""
    directory.mkdir(parents=True)
    from transformers import AutoModelForCausalLM  # here: it takes seconds, and most that import this file use no model
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # two of them wait for each other where the machine is busy
    torch.manual_seed(SEED)
    model: Any = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    _warm_start(model, steps)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(task.words(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    return directory


def config() -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=task.VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=task.DOWN,
        eos_token_id=task.END,
        pad_token_id=task.UNKNOWN,
    )


def _warm_start(model: Any, steps: int) -> None:
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        rows = [task.demonstration(rng) for _ in range(ROWS)]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [task.UNKNOWN] * (longest - len(row)) for row in rows])
        labels = ids.clone()
        labels[:, :2] = -100  # the prompt
        for row, tokens in enumerate(rows):
            labels[row, len(tokens) :] = -100
        loss = model(input_ids=ids, attention_mask=(labels != -100) | (ids != task.UNKNOWN), labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def expected_reward(model: Any, numbers: list[int]) -> float:
    """The mean reward that the model's answers have at temperature 1, over `numbers`: exact, nothing is sampled.

    The expected share before the first mistake is the mean, over the right answer's tokens, of the probability that
    all tokens up to there are right, which one forward pass over the right answers gives.
    """
    rows = [task.prompt(n) + task.right_answer(n) for n in numbers]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [task.UNKNOWN] * (longest - len(row)) for row in rows])  # causal: padding is not seen
    with torch.inference_mode():
        logprobs = model(input_ids=ids).logits.float().log_softmax(-1)
    right = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    rewards = [float(right[row, 1 : len(tokens) - 1].cumsum(0).exp().mean()) for row, tokens in enumerate(rows)]
    return sum(rewards) / len(rewards)
