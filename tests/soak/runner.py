"""A runner of the soak: agents that roll out sessions whose right answers they know, and write down what they got.

`python -m tests.soak.runner --gateway URL --gateway URL --journal FILE ...`, with the agents' key in `LAMINAR_API_KEY`.
It survives kill -9: started again, it goes on with the sessions that its journal has open. Once the file of `--until`
is there it begins no further session, ends those that are open, and exits.

Invariants: a request is repeated, the same to the byte, until it is answered; what was answered is in the journal
before the next request is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.soak.journal import Follower, Journal
from tests.soak.work import Session, body_of, session_name, session_of

AGAIN_S = (0.1, 0.3, 1.0, 2.0)
READ_TIMEOUT_S = 45.0
"""Of silence: a gateway that computes sends a sign of life at least every 30 s."""
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class Refused(Exception):
    """An answer that no repetition mends."""


@dataclass
class Open:
    """A session that is under way, as the journal has it."""

    calls_key: str = ""
    finish_key: str = ""
    answers: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    ids: list[int]
    spans: list[tuple[int, int, int]]


def recovered(path: Path) -> tuple[dict[str, Open], int]:
    """The open sessions of a journal, and the number of the next one."""
    found: dict[str, Open] = {}
    begun = 0
    for entry in Follower(path).entries():
        name = entry["session"]
        match entry["did"]:
            case "begin":
                found[name] = Open()
                begun += 1
            case "open":
                found[name].calls_key, found[name].finish_key = entry["calls_key"], entry["finish_key"]
            case "turn":
                found[name].answers.append(entry["ids"])
            case "finish" | "refused":
                del found[name]
    return found, begun


class Runner:
    def __init__(self, options: argparse.Namespace, journal: Journal, http: aiohttp.ClientSession) -> None:
        self._options, self._journal, self._http = options, journal, http
        self._key = os.environ["LAMINAR_API_KEY"]
        self._open, self._next = recovered(options.journal)

    async def agent(self) -> None:
        """Rolls out one session after the other."""
        chance = random.Random()
        while True:
            left = sorted(self._open)
            if left:
                name, state = left[0], self._open.pop(left[0])
            elif self._options.until.exists():
                return
            else:
                name, state = session_name(self._options.seed, self._options.number, self._next), Open()
                self._next += 1
                self._journal.add(did="begin", session=name)
            await self._roll_out(session_of(name, len(self._options.gateway)), state)
            await asyncio.sleep(chance.uniform(0, 2) * self._options.pause_s)

    async def _roll_out(self, session: Session, state: Open) -> None:
        try:
            if not state.calls_key:
                await self._create(session, state)
            history: list[int] = []
            for number, turn in enumerate(session.turns):
                history += turn.prompt
                if number == len(state.answers):
                    answer = await self._ask(session, number, history, state)
                    self._journal.add(did="turn", session=session.name, turn=number, ids=answer.ids, spans=answer.spans)
                    state.answers.append(answer.ids)
                history += state.answers[number]
            finish = {"reward": session.reward}
            await self._post(session, f"/sessions/{session.name}/finish", finish, {}, state.finish_key)
            self._journal.add(did="finish", session=session.name)
        except Refused as error:
            self._journal.add(did="refused", session=session.name, why=str(error))

    async def _create(self, session: Session, state: Open) -> None:
        """Makes the session. Half of them are led with the keys that the gateway gave, half with the agents' key.

        Where the answer got lost, the gateway has a session of that name already: its keys are not known, and the
        agents' key, which made it, serves as well.
        """
        state.calls_key = state.finish_key = self._key
        status, answer = await self._send(session, "/sessions", {"session_id": session.name}, {}, self._key)
        if status == 200 and int(session.reward * 1000) % 2:
            made = json.loads(answer)
            state.calls_key, state.finish_key = made["api_key"], made["finish_key"]
        elif status not in (200, 409):
            raise Refused(f"POST /sessions: {status} {answer[:300]}")
        keys = {"calls_key": state.calls_key, "finish_key": state.finish_key}
        self._journal.add(did="open", session=session.name, **keys)

    async def _ask(self, session: Session, number: int, history: list[int], state: Open) -> Answer:
        headers = {"Idempotency-Key": f"{session.name}-{number}"}
        turn = session.turns[number]
        path = f"/s/{session.name}/v1/completions"
        text = await self._post(session, path, body_of(turn, history), headers, state.calls_key)
        return answer_of(text, stream=turn.stream)

    async def _post(
        self, session: Session, path: str, body: Mapping[str, Any], headers: Mapping[str, str], key: str
    ) -> str:
        status, text = await self._send(session, path, body, headers, key)
        if status != 200:
            raise Refused(f"POST {path}: {status} {text[:300]}")
        return text

    async def _send(
        self, session: Session, path: str, body: Mapping[str, Any], headers: Mapping[str, str], key: str
    ) -> tuple[int, str]:
        """Sends it until it is answered by something that a repetition would not change."""
        url = self._options.gateway[session.gateway] + path
        data = json.dumps(body).encode()
        headers = {**headers, "Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        attempt = 0
        while True:
            try:
                async with self._http.post(url, data=data, headers=headers) as answer:
                    text = await answer.text()
                    if answer.status == 500:
                        self._journal.add(did="500", session=session.name, path=path, answer=text[:300])
                    whole = not body.get("stream") or text.rstrip().endswith("data: [DONE]")
                    if answer.status not in TRANSIENT and (answer.status != 200 or whole):
                        return answer.status, text
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                pass  # the gateway, or the link to it, is away: that is what the soak does to it
            await asyncio.sleep(AGAIN_S[min(attempt, len(AGAIN_S) - 1)])
            attempt += 1


def answer_of(text: str, *, stream: bool) -> Answer:
    """Refused for an error that came within the body, after status 200."""
    events = [text]
    if stream:
        # By line feeds: text that a model chose may hold what `splitlines` takes for ends of lines, such as U+2028.
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")][:-1]
    ids: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for event in map(json.loads, events):
        if "choices" not in event:
            raise Refused(f"an error in the body: {str(event)[:300]}")
        for choice in event["choices"]:
            ids += choice.get("token_ids") or ()
            spans += [(s["start"], s["end"], int(s["version"])) for s in choice.get("weight_versions") or ()]
    return Answer(ids, spans)


async def run(options: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=READ_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    with Journal(options.journal) as journal:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as http:
            runner = Runner(options, journal, http)
            async with asyncio.TaskGroup() as agents:
                for _ in range(options.agents):
                    agents.create_task(runner.agent())


def main() -> None:
    parser = argparse.ArgumentParser(description="Rolls out sessions of a soak.")
    parser.add_argument("--gateway", action="append", required=True, help="base URL; given once for each gateway")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--until", type=Path, required=True, help="a file; once it is there, the runner ends")
    parser.add_argument("--seed", type=int, required=True, help="the run's")
    parser.add_argument("--number", type=int, required=True, help="of this runner")
    parser.add_argument("--agents", type=int, required=True, help="sessions at once")
    parser.add_argument("--pause-s", type=float, required=True, help="mean pause of an agent between two sessions")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
