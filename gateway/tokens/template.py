"""Chat templates, rendered as `transformers` renders them (its `_compile_jinja_template`), without importing it.

Templates come with models from anywhere: they run in jinja2's immutable sandbox and see only what is passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.tokens.toolformats import CALL_BEGIN
from protos.errors import InvalidRequest

Message = Mapping[str, Any]
"""One chat message as the API has it, with tool arguments already as objects."""


class _Generation(jinja2.ext.Extension):
    """Ignores `{% generation %}`, which marks the model's text for training masks: the gateway's records have those."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _names(parsed: jinja2.nodes.Template) -> frozenset[str]:
    """Everything that a template may name a field by: `message.FIELD`, `message['FIELD']`, `'FIELD' in message`."""
    constants = {node.value for node in parsed.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return frozenset(constants | {node.attr for node in parsed.find_all(jinja2.nodes.Getattr)})


class ChatTemplate:
    """`source` compiled once; `constants` are the tokenizer's special tokens that templates may name."""

    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._constants = dict(constants)
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
            self.names = _names(parsed)
        except jinja2.TemplateSyntaxError as e:
            raise InvalidRequest(
                f"the chat template does not parse: line {e.lineno}: {e.message}",
                hint="repair chat_template.jinja of --tokenizer",
            ) from e

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.variables

    @property
    def knows_calls(self) -> bool:
        """It writes calls in a format of its own, perhaps without listing tools (DeepSeek V3)."""
        return self.knows_tools or CALL_BEGIN in self.source

    @cached_property
    def takes_objects(self) -> bool:
        """Whether it takes a call's arguments as an object, as templates do; some only join their JSON text."""
        if self._renders_call({"a": "b"}):
            return True
        return not self._renders_call("{}")  # if neither, it is not the arguments

    @property
    def knows_no_content(self) -> bool:
        """It asks whether an answer has content, and writes calls only where it has none (DeepSeek R1)."""
        return "['content'] is none" in self.source

    def _renders_call(self, arguments: Any) -> bool:
        call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": None if self.knows_no_content else "", "tool_calls": [call]}
        try:
            self.render([{"role": "user", "content": "?"}, answer], add_generation_prompt=False)
        except InvalidRequest:
            return False
        return True

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidRequest, with the template's message, when it refuses the messages."""
        try:
            return self._template.render(
                **{
                    **self._constants,
                    **(kwargs or {}),
                    "messages": messages,
                    "tools": tools or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
            raise InvalidRequest(f"the model's chat template cannot render these messages: {e}") from e
