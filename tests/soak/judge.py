"""The judge: compares what runners were answered with what the trainer was handed. Pure: entries in, findings out.

Invariants:
- nothing that a daemon counts is believed: a session is right when the trainer's trajectory of it is, token by token,
  the prompts of `work` and the answers in the runner's journal, once, with the reward of `work`;
- what is right and over is forgotten but for its name, so that hours fit into memory;
- what is missing is `outstanding` until the end of the run; `close` makes it lost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tests.soak.journal import Entry
from tests.soak.work import Run, Session, merged, session_of

Kind = Literal[
    "turn lost",
    "turn doubled",
    "wrong tokens",
    "wrong versions",
    "wrong reward",
    "wrong weights",
    "version went back",
    "lease lost",
    "unknown session",
    "process ended",
    "stood still",
    "unexpected error",
    "stranger let in",
]
"""Each is a failure of the run."""
FINDINGS_KEPT = 100


class Span(NamedTuple):
    """Tokens that one version is said to have chosen, greedily, after `before`."""

    session: str
    version: int
    before: tuple[int, ...]
    found: tuple[int, ...]


@dataclass
class _Open:
    """A session that is not settled. `used`: the trajectory, once the trainer has it."""

    session: Session
    answers: list[list[int]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finished: bool = False
    used: Entry | None = None


class Judge:
    def __init__(self, num_gateways: int) -> None:
        self._num_gateways = num_gateways
        self._open: dict[str, _Open] = {}
        self._settled: set[str] = set()
        self._used: set[str] = set()
        self.steps: dict[int, int] = {0: 0}  # by version
        self._versions: dict[int, int] = {}  # by step
        self._newest: dict[str, int] = {}  # version by who showed it
        self.counts: Counter[str] = Counter()  # sessions, turns, tokens, versions, and what is reported besides
        self.failures: Counter[Kind] = Counter()
        self.findings: list[str] = []

    def find(self, kind: Kind, what: str, count: int = 1) -> None:
        self.failures[kind] += count
        if len(self.findings) < FINDINGS_KEPT:
            self.findings.append(f"{kind}: {what}")

    @property
    def outstanding(self) -> int:
        """Sessions that a runner has begun and that the trainer has not used."""
        return len(self._open)

    # ---- what runners wrote

    def runner(self, entry: Entry) -> list[Span]:
        """Takes an entry of a runner's journal; returns what is to be compared with the weights."""
        name = entry["session"]
        if entry["did"] == "500":
            self.find("unexpected error", f"{entry['path']} answers 500: {entry['answer']}")
            return []
        state = self._open.get(name)
        if state is None:
            if name in self._settled:
                self.find("unknown session", f"{name} goes on after its end: {entry['did']}")
                return []
            state = self._open[name] = _Open(session_of(name, self._num_gateways))
        match entry["did"]:
            case "turn":
                return self._turn(state, entry)
            case "finish":
                state.finished = True
                self.counts["sessions"] += 1
                self._settle(state)
            case "refused":
                self.find("turn lost", f"{name}, turn {len(state.answers)}: {entry['why']}")
                self._forget(state)
        return []

    def _turn(self, state: _Open, entry: Entry) -> list[Span]:
        """An answer has the wanted length, and its spans cover it."""
        session, ids, number = state.session, entry["ids"], entry["turn"]
        turn = session.turns[number]
        spans = [(int(start), int(end), int(version)) for start, end, version in entry["spans"]]
        if len(ids) != turn.num_tokens:
            self.find("turn lost", f"{session.name}, turn {number}: {len(ids)} of {turn.num_tokens} tokens")
        if [*(s[0] for s in spans), len(ids)] != [0, *(s[1] for s in spans)]:
            self.find("wrong versions", f"{session.name}, turn {number}: spans {spans} of {len(ids)} tokens")
        state.ids += turn.prompt
        begin = len(state.ids)
        state.ids += ids
        state.answers.append(ids)
        state.runs += [(begin + start, begin + end, version) for start, end, version in spans]
        self.counts["turns"] += 1
        self.counts["tokens"] += len(ids)
        whole = tuple(state.ids)
        return [
            Span(session.name, version, whole[: begin + start], whole[begin + start : begin + end])
            for start, end, version in spans
        ]

    # ---- what the trainer wrote

    def trainer(self, entry: Entry) -> None:
        match entry["did"]:
            case "used":
                for trajectory in entry["used"]:
                    self._use(trajectory)
            case "late":
                self.find("lease lost", f"{entry['lease']}: {entry['why']}")
            case "published":
                self._published(entry["step"], entry["version"])
            case "life":
                self.counts["lives of the trainer"] += 1

    def _published(self, step: int, version: int) -> None:
        """Versions grow with steps, and each has one step."""
        if version <= self._newest.get("trainer", 0):
            self.find("version went back", f"step {step} is version {version} after {self._newest['trainer']}")
        self.shown("trainer", version, step)
        self.counts["versions"] += 1

    def shown(self, by: str, version: int, step: int) -> None:
        """`by`, a relay or the trainer, showed `version` as its newest."""
        if self.steps.setdefault(version, step) != step:
            self.find("wrong versions", f"version {version} is of step {step} at {by}, and of {self.steps[version]}")
        if self._versions.setdefault(step, version) != version:
            self._versions[step] = version
            self.counts["steps that became two versions"] += 1
        if version < self._newest.get(by, 0):
            self.find("version went back", f"{by} shows {version} after {self._newest[by]}")
        self._newest[by] = max(version, self._newest.get(by, 0))

    def _use(self, trajectory: Entry) -> None:
        name = trajectory["session"]
        if trajectory["leaf"] > 0:
            self.find("turn doubled", f"{name} has {trajectory['leaves']} leaves")
            return
        if name in self._used:
            num_turns = len(session_of(name, self._num_gateways).turns)
            self.find("turn doubled", f"{name} is used a second time", num_turns)
            return
        if name not in self._open:
            self.find("unknown session", f"{name} was used, and no runner began it")
            return
        self._used.add(name)
        self._open[name].used = trajectory
        self._settle(self._open[name])

    def _settle(self, state: _Open) -> None:
        """Compares a session that is finished and used."""
        if not state.finished or state.used is None:
            return
        name, used = state.session.name, state.used
        if used["reward"] != state.session.reward:
            self.find("wrong reward", f"{name}: {used['reward']}, and its runner gave {state.session.reward}")
        if used["ids"] != state.ids:
            self.find("turn lost", f"{name}: {_difference(used['ids'], state.ids)}")
        elif (runs := merged([tuple(run) for run in used["runs"]])) != (wanted := merged(state.runs)):
            self.find("wrong versions", f"{name}: sampled {runs} for the trainer, {wanted} for the runner")
        self._forget(state)

    def _forget(self, state: _Open) -> None:
        self._settled.add(state.session.name)
        del self._open[state.session.name]

    # ---- the end

    def close(self) -> None:
        """The run is over, and everything had its time: what is still missing is lost."""
        for state in sorted(self._open.values(), key=lambda state: state.session.name):
            where = "finished, and never used" if state.finished else "never finished"
            self.find("turn lost", f"{state.session.name} is {where}", max(1, len(state.answers)))
        self._open.clear()


def _difference(found: list[int], wanted: list[int]) -> str:
    at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    return f"{len(found)} tokens for the trainer, {len(wanted)} for the runner, the first difference at {at}"
