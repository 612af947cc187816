"""The tokenizer and chat template of one model directory: everything between messages, text and token ids.

Tokenises as the engines do: `tokenizer.json` through `tokenizers`, chat prompts without added special tokens (the
template writes them itself). Reads no weights and needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tokenizers import Tokenizer

from gateway.tokens import bridge as bridging
from gateway.tokens.bridge import Bridged, TemplateNeeds
from gateway.tokens.reasoning import REASONING_MARKERS, TAGS, ReasoningFormat, reasoning_format_of
from gateway.tokens.stream import (
    ByteLevelDetokenizer,
    Detokenizer,
    StreamDecoder,
    WindowDetokenizer,
    is_byte_level,
    lone_token_bytes,
    token_bytes,
)
from gateway.tokens.template import ChatTemplate, Message
from gateway.tokens.toolformats import MARKERS, ToolFormat, format_of
from protos.errors import InvalidRequest, UnsupportedField

Tool = Mapping[str, Any]
"""An OpenAI tool: {"type": "function", "function": {...}}."""

BATCH_CHARS = 2_000
"""A text of this length takes half a millisecond to tokenise: long enough to let other threads run meanwhile."""
TOOL_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Qwen2.5's wording, added to the system message for models whose template has no tools (SmolLM2)."""

DEEPSEEK_TOOL_PROMPT = """\
## Tools

You may call one or more of these functions, each described by a line of JSON:
{tools}

A call has this form, with the arguments as a JSON object:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
ARGUMENTS
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""
"""The same in the format of templates that write calls and list no tools (DeepSeek V3 and R1)."""


class Rendering(TypedDict, total=False):
    """How a conversation is rendered. `continued`: its ids end within the last message, which the model continues."""

    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any] | None
    continued: bool


class Codec:
    """A model's tokenizer and chat template. Immutable, so it may be shared."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None,
        eos_ids: frozenset[int],
        eos_token: str | None,
        context_tokens: int | None,
        vocab_size: int,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.template = template
        self.eos_ids = eos_ids
        self.context_tokens = context_tokens
        self.vocab_size = vocab_size
        self._eos_token = eos_token
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self.hidden_ids = frozenset(special | eos_ids)
        self._hidden_for_parsing = frozenset(
            i for i in self.hidden_ids if i not in added or added[i].content not in (*MARKERS, *REASONING_MARKERS)
        )
        self._byte_level = is_byte_level(tokenizer)

    @classmethod
    def load(cls, directory: Path | str) -> Codec:
        """Reads tokenizer.json, and the configs and templates beside it that exist. Raises InvalidRequest."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidRequest(
                f"no tokenizer.json in {directory}", hint="give a Hugging Face model directory with a fast tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:
            hint = "save the model's fast tokenizer there again"
            raise InvalidRequest(f"{path} cannot be read: {e}", hint=hint) from e
        tokenizer_config = _read(directory / "tokenizer_config.json")
        config, generation = _read(directory / "config.json"), _read(directory / "generation_config.json")
        constants = _special_tokens(tokenizer_config)
        source = _template_source(directory, tokenizer_config)
        return cls(
            tokenizer,
            template=None if source is None else ChatTemplate(source, constants),
            eos_ids=_eos_ids(tokenizer, constants.get("eos_token"), config, generation),
            eos_token=constants.get("eos_token"),
            context_tokens=config.get("max_position_embeddings"),
            vocab_size=max(
                tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values()), config.get("vocab_size", 0)
            ),
        )

    @cached_property
    def vocabulary(self) -> str:
        """A digest of the mapping from ids to tokens."""
        tokens = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    # text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) < BATCH_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` holds the interpreter's lock to its end, for seconds of a large text; a batch of one releases it.
        [encoded] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def shared(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The same ids, made of integers that all sequences share: 8 bytes a token instead of 36."""
        try:
            if len(token_ids) < 2:  # for one id, `itemgetter` returns no tuple
                return tuple([self._integers[token_id] for token_id in token_ids])
            found: tuple[int, ...] = itemgetter(*token_ids)(self._integers)  # twice as fast as one by one
            return found
        except IndexError:  # a record of a larger vocabulary
            return tuple(token_ids)

    @cached_property
    def _integers(self) -> list[int]:
        return list(range(self.vocab_size))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself."""
        return self._bytes[token_id]

    def stream_decoder(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        show_special: bool = False,
        markers: bool = False,
    ) -> StreamDecoder:
        """A decoder of the text after `prompt_ids`. `markers`: it shows the tags of calls and reasoning, too."""
        return StreamDecoder(self._detokenizer(prompt_ids, show_special, markers), stop, min_tokens=min_tokens)

    def _detokenizer(self, prompt_ids: Sequence[int], show_special: bool, markers: bool) -> Detokenizer:
        if self._byte_level:
            return ByteLevelDetokenizer(
                self._bytes if show_special else self._parsing_bytes if markers else self._visible_bytes
            )
        hidden = frozenset[int]() if show_special else self._hidden_for_parsing if markers else self.hidden_ids
        return WindowDetokenizer(self.tokenizer, hidden, prompt_ids[-5:])

    @cached_property
    def _bytes(self) -> list[bytes]:
        if self._byte_level:
            return token_bytes(self.tokenizer, self.vocab_size)
        return [lone_token_bytes(self.tokenizer, token_id) for token_id in range(self.vocab_size)]

    @cached_property
    def _visible_bytes(self) -> list[bytes]:
        return _without(self._bytes, self.hidden_ids)

    @cached_property
    def _parsing_bytes(self) -> list[bytes]:
        return _without(self._bytes, self._hidden_for_parsing)

    # chat

    @property
    def tool_format(self) -> ToolFormat:
        """The format of this model's tool calls: its template's; Hermes' where the template has no calls."""
        if self.template is None:
            return "none"
        return format_of(self.template.source) if self.template.knows_calls else "hermes"

    @property
    def reasoning_format(self) -> ReasoningFormat:
        """The tags between which the model reasons, where its template knows reasoning."""
        return "none" if self.template is None else reasoning_format_of(self.template.source)

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends within reasoning: some templates write the opening tag themselves."""
        tags = TAGS.get(self.reasoning_format)
        return tags is not None and self.decode(prompt_ids[-16:]).rstrip().endswith(tags[0])

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **how: Unpack[Rendering]
    ) -> list[int]:
        """Token ids of a conversation through the chat template."""
        return self.encode(self.render_text(messages, tools, **how))

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **how: Unpack[Rendering]
    ) -> str:
        kwargs = how.get("template_kwargs")
        if how.get("continued"):
            prepared = self._prepare(bridging.open_ended(messages), tools)
            rendered = self._render_prepared(prepared, tools, False, kwargs)
            return bridging.up_to_mark(rendered, bridging.content_text(messages[-1].get("content")))
        prepared = self._prepare(messages, tools)
        return self._render_prepared(prepared, tools, how.get("add_generation_prompt", True), kwargs)

    def bridge(
        self,
        recorded_ids: Sequence[int],
        recorded_messages: Sequence[Message],
        added: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        **how: Unpack[Rendering],
    ) -> Bridged:
        """The next prompt: the record, then the ids of `added` alone. `recorded_messages` end with an answer.

        `tools` and `template_kwargs` must be those of the recorded turns: their prompts were rendered with them.
        """
        rendered = self.render_text(bridging.marked(recorded_messages, added), tools, **how)
        suffix = self.encode(bridging.after_mark(rendered))
        return bridging.join(recorded_ids, suffix, self.turn_end_ids, ends_begin=self._ends_begin)

    @cached_property
    def _ends_begin(self) -> bool:
        """Whether a user's turn begins with a token that ends the turn before."""
        mark = bridging.ANSWER_MARK
        try:
            rendered = self.render_text([{"role": "user", "content": mark}], add_generation_prompt=False)
        except InvalidRequest:  # a template that wants more than a user's message
            return False
        before = rendered.partition(mark)[0]
        added = self.tokenizer.get_added_tokens_decoder()
        last = next((i for i in reversed(self.encode(before)) if i in added), None)
        return last in self.turn_end_ids

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """The end-of-sequence tokens that the template writes at the end of a turn."""
        if self.template is None:
            return frozenset()
        source = self.template.source
        named = {i for i in self.eos_ids if (token := self.tokenizer.id_to_token(i)) is not None and token in source}
        if "eos_token" in self.template.variables and self._eos_token is not None:
            named |= {i for i in [self.tokenizer.token_to_id(self._eos_token)] if i is not None}
        return frozenset(named)

    def _prepare(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
        if self.template is None:
            raise UnsupportedField(
                "this model's tokenizer has no chat template", hint="use /v1/completions, or add chat_template.jinja"
            )
        template = self.template
        needs = TemplateNeeds(template.knows_calls, template.takes_objects, template.knows_no_content)
        prepared = bridging.template_messages(messages, needs)
        return prepared if template.knows_tools or not tools else _with_tool_prompt(prepared, tools, self.tool_format)

    def _render_prepared(
        self,
        prepared: Sequence[Message],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        assert self.template is not None
        return self.template.render(
            prepared,
            tools=tools if self.template.knows_tools else None,
            add_generation_prompt=add_generation_prompt,
            kwargs=template_kwargs,
        )


def _with_tool_prompt(messages: list[dict[str, Any]], tools: Sequence[Tool], form: ToolFormat) -> list[dict[str, Any]]:
    described = DEEPSEEK_TOOL_PROMPT if form == "deepseek" else TOOL_PROMPT
    prompt = described.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _without(table: list[bytes], hidden: frozenset[int]) -> list[bytes]:
    return [b"" if token_id in hidden else text for token_id, text in enumerate(table)]


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"{path} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must hold a JSON object")
    return value


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, as text; older configs write them as objects."""
    found = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source if isinstance(source, str) else None


def _eos_ids(tokenizer: Tokenizer, eos_token: str | None, *configs: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or ())
    if eos_token is not None and (token_id := tokenizer.token_to_id(eos_token)) is not None:
        found.add(token_id)
    return frozenset(found)
