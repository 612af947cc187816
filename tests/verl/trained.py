"""A program: verl's trainer in the mode `laminar` on local Ray and a CPU. Prints a JSON object for each step."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ |= {
    "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu,trainer_client.integrations.verl.trainer",
    "VERL_ENGINE_DEVICE": "cuda",
    "TRANSFER_QUEUE_ENABLE": "1",
}

import pandas as pd
import transfer_queue as tq
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls

from tests.verl.rollouts import configuration
from tests.verl.task import PROMPTS
from tests.verl.workers import local_ray, parsed

STEPS = 3
SHOWN = {
    "laminar/version": "version",
    "training/rollout_probs_diff_max": "probability_off",
    "actor/grad_norm": "grad_norm",
    "critic/score/mean": "reward",
}


def documented() -> dict[str, str]:
    """The settings with which docs/verl.md starts the trainer."""
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text()
    block = page.split("VERL_USE_EXTERNAL_MODULES=trainer_client.integrations.verl.trainer\n")[1].split("```")[0]
    return dict(line.split("=", 1) for line in block.split())


def settings(flags: argparse.Namespace, data: Path) -> dict[str, Any]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        **documented(),
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[file]",
        "trainer.total_training_steps": STEPS,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": data.parent / "checkpoints",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": len(PROMPTS),
        "data.max_prompt_length": 128,
        "data.max_response_length": 128,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": len(PROMPTS),
        f"{actor}.ppo_micro_batch_size_per_gpu": len(PROMPTS),
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"{actor}.fsdp_config.dtype": "float32",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
        f"{rollout}.n_gpus_per_node": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": len(PROMPTS),
        f"{rollout}.checkpoint_engine.backend": "laminar",
        f"+{rollout}.checkpoint_engine.engine_kwargs.laminar.relay": flags.relay,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def main() -> None:
    flags = parsed()
    directory = Path(flags.directory)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(PROMPTS * 2)
    ]
    pd.DataFrame(rows).to_parquet(directory / "data.parquet")
    metrics = directory / "metrics.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(metrics)
    config = configuration(flags, "two_turns", **settings(flags, directory / "data.parquet"))
    with local_ray(num_gpus=1):
        tq.init(config.transfer_queue)
        trainer = get_trainer_cls("laminar")(config)
        trainer.init()
        handles = trainer.get_reward_handles()
        trainer.fit(AgentLoopManagerTQ.create(config, llm_client=None, reward_loop_worker_handles=handles))
        tq.close()
    for line in metrics.read_text().splitlines():
        found = json.loads(line)
        shown = {name: found["data"][key] for key, name in SHOWN.items() if key in found["data"]}
        print(json.dumps({"trained": found["step"], **shown}), flush=True)


if __name__ == "__main__":
    main()
