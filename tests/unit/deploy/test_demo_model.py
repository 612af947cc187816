"""The demo's model, made in an empty cache: what an old cache holds cannot hide that its conversion is broken."""

import os
import subprocess
import sys

import pytest

from deploy.demo.model import NAME
from deploy.setup_env import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ASK = "What is the capital of France?"


def test_the_model_is_made_in_an_empty_cache(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "deploy.demo.model"],
        env=os.environ | {"LAMINAR_CACHE": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = tmp_path / "models" / NAME
    assert done.stdout.strip() == str(made)
    assert "Paris" in _answer(made)
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in made.iterdir()), "others may share the cache"


def _answer(directory) -> str:
    """What the model says greedily; a projection whose rows are in the wrong order says nothing of sense."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": ASK}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
