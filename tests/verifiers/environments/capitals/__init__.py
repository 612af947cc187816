"""An environment as users of the verifiers library write them: a tool over MCP, one task for each country."""

from __future__ import annotations

import verifiers.v1 as vf

from capitals.tools import CAPITALS, CapitalTools

__all__ = ["CapitalsTaskset"]


class CapitalsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CapitalsData(vf.TaskData):
    answer: str


class CapitalsTask(vf.Task[CapitalsData, vf.State, CapitalsTaskConfig]):
    @classmethod
    def toolsets(cls, config: CapitalsTaskConfig) -> list[vf.Toolset]:
        return [CapitalTools(config.tools)]

    @vf.reward(weight=0.5)
    async def named(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class CapitalsConfig(vf.TasksetConfig):
    task: CapitalsTaskConfig = CapitalsTaskConfig()


class CapitalsTaskset(vf.Taskset[CapitalsTask, CapitalsConfig]):
    def load(self) -> list[CapitalsTask]:
        return [
            CapitalsTask(
                CapitalsData(
                    idx=i, name=country, prompt=f'What is the capital of "{country}"? Look it up.', answer=city
                ),
                self.config.task,
            )
            for i, (country, city) in enumerate(CAPITALS.items())
        ]
