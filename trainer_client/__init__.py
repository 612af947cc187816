"""The SDK: publishes weights, reads experience and plays sessions, with synchronous and asyncio clients.

with Publisher("127.0.0.1:7070") as publisher, ExperienceReader("http://127.0.0.1:8080") as reader:
    for step, batch in enumerate(reader.batches(groups=4, group_size=8)):
        train(batch.pack().torch())
        reader.trainer_version = publisher.publish(model.state_dict(), step=step).version

with Sessions("http://127.0.0.1:8080") as sessions, sessions.open(group_id="task-17", group_size=8) as session:
    answer = session.openai.chat.completions.create(model="policy", messages=[...])
    session.finish(1.0)
"""

from paramserver.client import RefusedLoad, SealedVersion, VersionLabels
from protos.packed import Facts, Offer
from protos.trajectories import Segment, Trajectory
from trainer_client.batches import Batch
from trainer_client.experience import AsyncExperienceReader, ExperienceReader
from trainer_client.publisher import AsyncPublisher, Publisher, PublisherStatus
from trainer_client.sessions import AsyncSession, AsyncSessions, Outcome, Session, Sessions
from trainer_client.streaming.lora import MergedLora, merged_lora
from trainer_client.streaming.manifest import Manifest, TensorMeta, gathered, manifest_of
from trainer_client.streaming.ranks import OneRank, Ranks, TorchRanks
from trainer_client.tasks import Added, AsyncPromptPool, PoolStatus, PromptPool, TaskOptions, TaskResult
from trainer_client.tickets import AsyncTicket, PendingTicket, Ticket, Wait
from trainer_client.trajectories import Packed, PackedTensors, Padded, PaddedTensors, pack
from trainer_client.wanted import Choice, Evicted, ExperienceStatistics, Strategy, Wanted

__all__ = [
    "Added",
    "AsyncExperienceReader",
    "AsyncPromptPool",
    "AsyncPublisher",
    "AsyncSession",
    "AsyncSessions",
    "AsyncTicket",
    "Batch",
    "Choice",
    "Evicted",
    "ExperienceReader",
    "ExperienceStatistics",
    "Facts",
    "Manifest",
    "MergedLora",
    "Offer",
    "OneRank",
    "Outcome",
    "Packed",
    "PackedTensors",
    "Padded",
    "PaddedTensors",
    "PendingTicket",
    "PoolStatus",
    "PromptPool",
    "Publisher",
    "PublisherStatus",
    "Ranks",
    "RefusedLoad",
    "SealedVersion",
    "Segment",
    "Session",
    "Sessions",
    "Strategy",
    "TaskOptions",
    "TaskResult",
    "TensorMeta",
    "Ticket",
    "TorchRanks",
    "Trajectory",
    "VersionLabels",
    "Wait",
    "Wanted",
    "gathered",
    "manifest_of",
    "merged_lora",
    "pack",
]
