"""Shared prefixes: the layout is smaller, and the logprobs are those of each row by itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from deploy.demo.training.families import lay_out, micro_batches, shared_prefix
from deploy.demo.training.policy import Policy
from tests.support.trajectories import make_trajectory
from trainer_client import Packed, pack

pytestmark = pytest.mark.slow  # the models of transformers take seconds to import

VOCABULARY = 64


def ids(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture
def batch() -> Packed:
    """Two groups of prompts of 9 and 5 tokens; rows of one to three turns; one row outside any sharing."""
    rng = random.Random(7)
    long_prompt, short_prompt = ids(9, rng), ids(5, rng)
    return pack(
        [
            make_trajectory("a", 0, long_prompt, (ids(4, rng), [])),
            make_trajectory("a", 1, long_prompt, (ids(1, rng), ids(3, rng)), (ids(5, rng), ids(2, rng))),
            make_trajectory(
                "b", 0, short_prompt, (ids(3, rng), ids(2, rng)), (ids(2, rng), ids(1, rng)), (ids(1, rng), [])
            ),
            make_trajectory("a", 2, long_prompt, (ids(6, rng), [])),
            make_trajectory("c", 0, ids(4, rng), (ids(2, rng), [])),
        ]
    )


def make_model(directory: Path, family: str) -> Path:
    kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[family]
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def plain_logprobs(policy: Policy, batch: Packed, row: int) -> torch.Tensor:
    """Of the sampled tokens of one row, by transformers' own attention."""
    policy.model.set_attn_implementation("eager")
    tokens = torch.from_numpy(batch.input_ids[batch.row(row)])
    logits = policy.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    policy.model.set_attn_implementation("laminar_families")
    every = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return every[torch.from_numpy(batch.loss_mask[batch.row(row)])[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_shared_prefixes_change_no_logprob_and_no_gradient(tmp_path: Path, batch: Packed, family: str) -> None:
    policy = Policy(make_model(tmp_path, family), lr=1e-3, dtype=torch.float32)
    layout = lay_out(batch, [[0, 1, 3], [2], [4]])
    shared = policy.logprobs(layout, torch.from_numpy(batch.input_ids))
    expected = torch.cat([plain_logprobs(policy, batch, row) for row in (0, 1, 3, 2, 4)])
    torch.testing.assert_close(shared, expected, rtol=0, atol=2e-6)

    weights = torch.linspace(-1, 1, len(shared))
    parameters = list(policy.model.parameters())
    by_sharing = torch.autograd.grad((shared * weights).sum(), parameters)
    row_by_row = torch.autograd.grad((expected * weights).sum(), parameters)
    torch.testing.assert_close(by_sharing, row_by_row, rtol=1e-4, atol=1e-6)


def test_the_layout_holds_a_shared_prompt_once_and_no_token_after_the_last_prediction(batch: Packed) -> None:
    layout = lay_out(batch, [[0, 1, 3]])
    assert len(layout.input_ids) == 9 + (4 - 1) + (1 + 3 + 5 - 1) + (6 - 1)
    assert layout.tokens.tolist() == [
        position
        for row in (0, 1, 3)
        for position in range(*batch.row(row).indices(99)[:2])
        if batch.loss_mask[position]
    ]
    assert layout.position_ids[:9].tolist() == list(range(9))
    assert all(int(layout.position_ids[start]) == 9 for start, _ in layout.families[0].suffixes)


def test_a_prefix_ends_where_rows_differ_and_before_any_sampled_token() -> None:
    same_answer = pack([make_trajectory("g", i, [1, 2, 3], ([4, 5, 6], [])) for i in range(2)])
    assert shared_prefix(same_answer, [0, 1]) == 3
    other_prompt = pack([make_trajectory("g", i, [1, i, 3], ([4], [])) for i in range(2)])
    assert shared_prefix(other_prompt, [0, 1]) == 1


@pytest.mark.parametrize(("tokens_max", "num_parts"), [(1, 5), (20, 4), (40, 2), (1000, 1)])
def test_micro_batches_hold_every_row_once_within_the_bound(batch: Packed, tokens_max: int, num_parts: int) -> None:
    rows = [0, 1, 2, 3, 4]
    parts = list(micro_batches(batch, rows, tokens_max=tokens_max))
    assert len(parts) == num_parts
    assert sorted(row for part in parts for group in part for row in group) == rows
    for part in parts:
        assert all(len({int(batch.group_index[row]) for row in group}) == 1 for group in part)
        num_rows = sum(len(group) for group in part)
        assert num_rows == 1 or len(lay_out(batch, part).input_ids) <= tokens_max
    assert not list(micro_batches(batch, [], tokens_max=tokens_max))


@pytest.mark.slow
def test_an_update_moves_the_weights_by_rounding_float32_masters(tmp_path: Path, batch: Packed) -> None:
    policy = Policy(make_model(tmp_path, "llama"), lr=1e-5)
    input_ids = torch.from_numpy(batch.input_ids)
    layout = lay_out(batch, [[0, 1, 3], [2], [4]])
    before = policy.logprobs(layout, input_ids).detach().sum()
    weight = policy.state_dict()["model.layers.0.mlp.up_proj.weight"]
    initial = weight.clone()
    norms = []
    for _ in range(40):
        (-policy.logprobs(layout, input_ids).sum()).backward()  # type: ignore[no-untyped-call]
        norms.append(policy.update(grad_norm_max=1.0))
    assert policy.logprobs(layout, input_ids).detach().sum() > before
    assert norms[0] > 0
    assert weight.dtype == torch.bfloat16
    moved = (weight != initial).float().mean()
    assert moved > 0.3, "single steps of 1e-5 are below bf16's spacing: only masters let them add up"
    policy.drop_gradients()
    assert policy.update(grad_norm_max=1.0) == 0.0


def test_in_float32_it_computes_with_the_very_bf16_weights_that_it_publishes(tmp_path: Path, batch: Packed) -> None:
    directory = make_model(tmp_path, "llama")
    checkpoint = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    checkpoint.save_pretrained(directory)
    policy = Policy(directory, lr=1e-3, dtype=torch.float32)
    layout = lay_out(batch, [[0, 1, 3], [2], [4]])
    initial = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    (-policy.logprobs(layout, torch.from_numpy(batch.input_ids)).sum()).backward()  # type: ignore[no-untyped-call]
    policy.update(grad_norm_max=1.0)
    published, computed = policy.state_dict(), policy.model.state_dict()
    assert published.keys() == computed.keys() == checkpoint.state_dict().keys()
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in computed.values()} == {torch.float32}
    for name, tensor in published.items():
        assert torch.equal(tensor.float(), computed[name]), name
    assert sum(int((tensor != initial[name]).sum()) for name, tensor in published.items()) > 1000
    tied = [published[name].data_ptr() for name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert tied[0] == tied[1], "published once"
