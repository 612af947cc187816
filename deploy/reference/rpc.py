"""docs/reference/grpc.md: services and messages of protos/laminar, with the comments of their source."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from deploy.reference import markdown
from deploy.reference.markdown import code, first_sentence, link, sentence, table
from protos import errors
from protos.errors import LaminarError
from protos.generate import ROOT, SOURCES

INTRO = """
A relay serves this on `--port`. Reflection and the standard health service are there as well, so that tools such as
`grpcurl` work. [publishing.md](../publishing.md) explains what a publisher does with it; `paramserver.client` is the
client.
"""
ERRORS = """
An error has the status of its code. The trailing metadata has `laminar-code`, `laminar-hint` (what would be right,
percent-encoded), and of `out_of_capacity` also `laminar-retry-after-s`.
"""

_RPC = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")
_FIELD = re.compile(r"(?:(repeated|optional) )?(map<\w+, \w+>|\w+) (\w+) = (\d+);")
_BLOCK = re.compile(r"(service|message) (\w+) \{")
_IN_ONE_LINE = re.compile(r"^((?:service|message) \w+ \{)\s*(\S.*?)?\s*\}$")


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    request: str
    response: str
    comment: str


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: str
    label: str  # repeated, optional or ""
    number: str
    comment: str


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    comment: str
    methods: list[Method] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Message:
    name: str
    comment: str
    fields: list[Field] = field(default_factory=list)


@dataclass(slots=True)
class Source:
    """What one .proto file declares."""

    package: str = ""
    comment: str = ""
    services: list[Service] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def parse(text: str) -> Source:
    """The declarations of a .proto file. A comment belongs to what follows it, or to the field before it on its line.

    Raises ValueError for a line that it does not know, so that nothing is left out in silence.
    """
    found, above = Source(), list[str]()
    within: Service | Message | None = None
    for number, line in enumerate(_lines(text), 1):
        before, _, comment = (part.strip() for part in line.partition("//"))
        if not before:
            above = [*above, comment] if comment else []
            continue
        said, above = " ".join([*above, comment]).strip(), []
        if before.startswith("syntax"):
            found.comment = said
        elif before.startswith("reserved "):
            continue  # numbers of former fields
        elif before.startswith("package"):
            found.package = before.removeprefix("package").strip(" ;")
        elif block := _BLOCK.fullmatch(before):
            within = Service(block[2], said) if block[1] == "service" else Message(block[2], said)
            if isinstance(within, Service):
                found.services.append(within)
            else:
                found.messages.append(within)
        elif before == "}":
            within = None
        elif isinstance(within, Service) and (rpc := _RPC.fullmatch(before)):
            within.methods.append(Method(rpc[1], f"{rpc[2] or ''}{rpc[3]}", f"{rpc[4] or ''}{rpc[5]}", said))
        elif isinstance(within, Message) and (one := _FIELD.fullmatch(before)):
            within.fields.append(Field(one[3], one[2], one[1] or "", one[4], said))
        else:
            raise ValueError(f"line {number}: deploy/reference/rpc.py does not know {before!r}")
    return found


def _lines(text: str) -> Iterator[str]:
    """The lines, with blocks that stand in one line in several."""
    for line in text.splitlines():
        if whole := _IN_ONE_LINE.match(line.strip()):
            yield from filter(None, (whole[1], whole[2], "}"))
        else:
            yield line


def sources() -> Mapping[str, Source]:
    """By path below the repository's root."""
    return {str(path.relative_to(ROOT)): parse(path.read_text()) for path in SOURCES}


def page() -> str:
    parts = [part for name, source in sources().items() for part in _source(name, source)]
    return markdown.page(
        "gRPC of a relay",
        INTRO,
        *parts,
        "## Errors",
        ERRORS,
        table(("code", "status", "when"), _errors()),
    )


def _source(name: str, source: Source) -> Iterator[str]:
    names = {message.name for message in source.messages}
    for service in source.services:
        yield f"## {source.package}.{service.name}"
        yield f"{sentence(service.comment or source.comment)} The source is `{name}`."
        yield table(
            ("method", "request", "response", "what it does"),
            [
                (code(one.name), _kind(one.request, names), _kind(one.response, names), sentence(one.comment))
                for one in service.methods
            ],
        )
    yield "## Messages"
    for message in sorted(source.messages, key=lambda one: one.name):
        yield f"### {message.name}"
        yield sentence(message.comment)
        yield (
            table(
                ("field", "type", "number", "what it is"),
                [
                    (code(one.name), f"{one.label} {_kind(one.kind, names)}".strip(), one.number, sentence(one.comment))
                    for one in message.fields
                ],
            )
            or "It has no fields."
        )


def _kind(kind: str, messages: Collection[str]) -> str:
    """A type, with a link where it is a message of the page."""
    stream, name = ("stream ", kind.removeprefix("stream ")) if kind.startswith("stream ") else ("", kind)
    return stream + (link(name, name) if name in messages else code(name))


def _errors() -> list[tuple[str, str, str]]:
    kinds = sorted(errors.BY_CODE.items())
    return [(code(name), code(kind.grpc_status), _when(kind)) for name, kind in kinds]


def _when(kind: type[LaminarError]) -> str:
    if kind is LaminarError:
        return "An unexpected error of the relay; its log has the details."
    return first_sentence(kind.__doc__)
