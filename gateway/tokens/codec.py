"""The tokenizer and chat template of one model directory: everything between messages, text and token ids.

Tokenises as the engines do: `tokenizer.json` through `tokenizers`, chat prompts without added special tokens (the
template writes them itself). Reads no weights and needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tokenizers import Tokenizer

from gateway.core.types import InText
from gateway.tokens import bridge as bridging
from gateway.tokens.bridge import Bridged, content_text
from gateway.tokens.chat import Chat
from gateway.tokens.reasoning import REASONING_MARKERS, TAGS, ReasoningFormat
from gateway.tokens.special import SpecialTokens
from gateway.tokens.stream import (
    ByteLevelDetokenizer,
    CallDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    is_byte_level,
    lone_token_bytes,
    token_bytes,
)
from gateway.tokens.template import ChatTemplate, Message
from gateway.tokens.toolformats import MARKERS, Tool, ToolFormat
from protos.errors import InvalidRequest, TooLarge, UnsupportedField

BATCH_CHARS = 2_000
"""A text of this length takes half a millisecond to tokenise: long enough to let other threads run meanwhile."""
SLICE_CHARS = 1 << 19
TOKENS_LEAST, TOKENS_MAX = 1 << 19, 1 << 21
"""Of one text: four times the model's own context, which engines may stretch, and at least the first; the second where
no context is known."""
DEFAULT = "default"
TEMPLATES = (DEFAULT, "tool_use")
"""Names of chat templates: that of requests without tools and, where there is another, that of requests with them."""
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


class Rendering(TypedDict, total=False):
    """How a conversation is rendered. `continued`: its ids end within the last message, which the model continues."""

    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any] | None
    continued: bool


class TooManyTokens(TooLarge):
    """A text that no context holds."""

    code = "context_length_exceeded"


class Codec:
    """A model's tokenizer and chat template. Immutable, so it may be shared."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        templates: Mapping[str, ChatTemplate],
        eos_ids: frozenset[int],
        eos_token: str | None,
        context_tokens: int | None,
        vocab_size: int,
        special_tokens_in_text: InText = "control",
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._plain_chat, self._tool_chat = ((Chat(t) if t else None) for t in map(templates.get, TEMPLATES))
        self.eos_ids = eos_ids
        self.context_tokens = context_tokens
        self.vocab_size = vocab_size
        self._eos_token = eos_token
        self._special = SpecialTokens(tokenizer, special_tokens_in_text)
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self.hidden_ids = frozenset(special | eos_ids)
        self._hidden_for_parsing = frozenset(
            i for i in self.hidden_ids if i not in added or added[i].content not in (*MARKERS, *REASONING_MARKERS)
        )
        self._hidden_in_calls = self._hidden_for_parsing & eos_ids
        self._byte_level = is_byte_level(tokenizer)
        self._shown_bytes: dict[frozenset[int], list[bytes]] = {}  # by the ids that are hidden, of which there are four

    @classmethod
    def load(cls, directory: Path | str, special_tokens_in_text: InText = "control") -> Codec:
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
        sources = _template_sources(directory, tokenizer_config)
        vocab_sizes = [tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values())]
        return cls(
            tokenizer,
            templates={name: ChatTemplate(sources[name], constants) for name in TEMPLATES if name in sources},
            eos_ids=_eos_ids(tokenizer, constants.get("eos_token"), config, generation),
            eos_token=constants.get("eos_token"),
            context_tokens=next(iter(_values(config, "max_position_embeddings")), None),
            vocab_size=max(vocab_sizes + _values(config, "vocab_size")),
            special_tokens_in_text=special_tokens_in_text,
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
        if len(text) > SLICE_CHARS:
            self._check_length(text)
        # `encode` holds the interpreter's lock to its end, for seconds of a large text; a batch of one releases it.
        [encoded] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def _check_length(self, text: str) -> None:
        """Raises TooManyTokens, by the tokens of its slices: whole, a text of 60 MiB takes 13 GB, and what it was made
        to is freed in one step that holds the interpreter's lock."""
        found, most = 0, TOKENS_MAX
        if self.context_tokens is not None:
            most = max(TOKENS_LEAST, 4 * self.context_tokens)
        for begin in range(0, len(text), SLICE_CHARS):
            [encoded] = self.tokenizer.encode_batch_fast([text[begin : begin + SLICE_CHARS]], add_special_tokens=False)
            found += len(encoded)
            if found > most:
                raise TooManyTokens(
                    f"the first {begin + SLICE_CHARS} of {len(text)} characters have {found} tokens",
                    hint=f"a prompt has at most {most}",
                )

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
        show_special: bool = False,
        markers: bool = False,
        in_call: Callable[[], bool] | None = None,
    ) -> Detokenizer:
        """A decoder of the text after `prompt_ids`. `markers`: it shows the tags of calls and reasoning, too, and where
        `in_call` says so all special tokens but those that end a turn."""
        if in_call is not None and markers and not show_special:
            special = self._hidden_for_parsing - self.eos_ids
            return CallDetokenizer(self._detokenizer(prompt_ids, self._hidden_in_calls), special, in_call)
        hidden = frozenset[int]() if show_special else self._hidden_for_parsing if markers else self.hidden_ids
        return self._detokenizer(prompt_ids, hidden)

    def _detokenizer(self, prompt_ids: Sequence[int], hidden: frozenset[int]) -> Detokenizer:
        if not self._byte_level:
            before = [
                token_id for token_id in prompt_ids[-5:] if token_id not in self._hidden_for_parsing or not hidden
            ]
            return WindowDetokenizer(self.tokenizer, hidden, before)
        if hidden not in self._shown_bytes:
            self._shown_bytes[hidden] = [
                b"" if token_id in hidden else text for token_id, text in enumerate(self._bytes)
            ]
        return ByteLevelDetokenizer(self._shown_bytes[hidden])

    @cached_property
    def _bytes(self) -> list[bytes]:
        if self._byte_level:
            return token_bytes(self.tokenizer, self.vocab_size)
        return [lone_token_bytes(self.tokenizer, token_id) for token_id in range(self.vocab_size)]

    # chat

    @property
    def chats(self) -> Sequence[Chat]:
        """The chat templates: that of requests without tools first."""
        return [chat for chat in (self._plain_chat, self._tool_chat) if chat is not None]

    @property
    def tool_format(self) -> ToolFormat:
        """The format of this model's tool calls."""
        return self.chats[-1].tool_format if self.chats else "none"

    @property
    def reasoning_format(self) -> ReasoningFormat:
        """The tags between which the model reasons, where a template of its knows reasoning."""
        return next((found for chat in self.chats if (found := chat.reasoning_format) != "none"), "none")

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool | None:
        """Whether the prompt ends within reasoning: some templates write the opening tag themselves, or both tags where
        the model is not to reason. None: it says nothing of it."""
        tags = TAGS.get(self.reasoning_format)
        end = self.decode(prompt_ids[-16:]).rstrip()
        return None if tags is None or not end.endswith(tags) else end.endswith(tags[0])

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **how: Unpack[Rendering]
    ) -> list[int]:
        """Token ids of a conversation through the chat template."""
        return self._encoded(self._rendered(messages, tools, how))

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **how: Unpack[Rendering]
    ) -> str:
        """Raises InvalidRequest where the template refuses a message, or drops its text."""
        return self._special.shown(self._rendered(messages, tools, how))

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
        messages, new = bridging.marked(recorded_messages, added), len(added)
        rest = self._encoded(self._rendered(messages, tools, how, new))
        return bridging.join(recorded_ids, rest, self.turn_end_ids, ends_begin=self._ends_begin)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, how: Rendering, new: int | None = None
    ) -> str:
        """The rendering, of which `_encoded` makes ids; up to the end of the last message's text, where that is
        continued. `new`: only that of the last messages, behind the marked answer."""
        messages, tools = self._special.guarded(messages, tools, new)
        continued = how.get("continued", False)
        rendered = self._chat(tools).render(
            bridging.open_ended(messages) if continued else messages,
            tools,
            new=new,
            add_generation_prompt=not continued and how.get("add_generation_prompt", True),
            template_kwargs=how.get("template_kwargs"),
        )
        if continued:
            rendered = bridging.up_to_mark(rendered, content_text(messages[-1].get("content")))
        if new is not None:
            rendered = bridging.after_mark(rendered)
        self._chat(tools).check(messages, rendered, new)
        return rendered

    def _encoded(self, rendered: str) -> list[int]:
        pieces = self._special.pieces(rendered)
        if pieces is None:
            return self.encode(rendered)
        if len(rendered) > SLICE_CHARS:
            self._check_length(rendered)
        plain, ids = self._special.plain, list[int]()
        for piece in pieces:
            ids += (
                [piece] if isinstance(piece, int) else plain.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            )
        return ids

    def _chat(self, tools: Sequence[Tool] | None) -> Chat:
        chat = self._tool_chat if tools and self._tool_chat is not None else self._plain_chat
        if chat is not None:
            return chat
        if self._tool_chat is not None:
            raise UnsupportedField(
                "this model's tokenizer has a chat template for requests with `tools` alone",
                hint="send `tools`, or add chat_template.jinja",
            )
        raise UnsupportedField(
            "this model's tokenizer has no chat template", hint="use /v1/completions, or add chat_template.jinja"
        )

    @cached_property
    def _ends_begin(self) -> bool:
        """Whether a user's turn begins with a token that ends the turn before."""
        before, _ = self._around(bridging.ANSWER_MARK, [{"role": "user", "content": bridging.ANSWER_MARK}])
        added = self.tokenizer.get_added_tokens_decoder()
        last = next((i for i in reversed(self.encode(before)) if i in added), None)
        return last in self.turn_end_ids

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """The tokens that end a turn: the end-of-sequence tokens that the templates write, and the token that they
        write behind a user's text and behind an answer alike (gpt-oss: its answers end with another one)."""
        named: set[int] = set()
        for chat in self.chats:
            source, variables = chat.template.source, chat.template.variables
            named |= {i for i in self.eos_ids if (text := self.tokenizer.id_to_token(i)) is not None and text in source}
            if "eos_token" in variables and self._eos_token is not None:
                named |= {i for i in [self.tokenizer.token_to_id(self._eos_token)] if i is not None}
        user, answer = "\ue0a1USER\ue0a2", bridging.ANSWER_MARK
        talk = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        follows = [
            self.encode(self._around(mark, [*talk, {"role": "user", "content": "?"}])[1])[:1] for mark in (user, answer)
        ]
        if follows[0] == follows[1]:
            named |= self.tokenizer.get_added_tokens_decoder().keys() & set(follows[0])
        return frozenset(named)

    def _around(self, mark: str, messages: Sequence[Message]) -> tuple[str, str]:
        """What the template writes before a mark and behind it; nothing where it refuses the messages."""
        try:
            before, _, after = self.chats[0].render(messages, add_generation_prompt=False).partition(mark)
        except (IndexError, InvalidRequest):  # no template, or one that wants other messages
            return "", ""
        return before, after


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


def _template_sources(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name, from where `transformers` finds them: files come before the tokenizer's config, and
    that before a processor's."""
    found = tokenizer_config.get("chat_template") or _read(directory / "chat_template.json").get("chat_template") or {}
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    sources = {DEFAULT: found} if isinstance(found, str) else dict(found)
    files = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    files[DEFAULT] = directory / "chat_template.jinja"
    return sources | {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}


def _values(config: Mapping[str, Any], name: str) -> list[Any]:
    """A setting of config.json and of the text model's own part of it (Gemma 3, Qwen3.5, InternVL), where it is set."""
    parts = [config, *(part for key in TEXT_CONFIGS if isinstance(part := config.get(key), dict))]
    return [value for part in parts if (value := part.get(name)) is not None]


def _eos_ids(tokenizer: Tokenizer, eos_token: str | None, *configs: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for config in configs:
        for ids in _values(config, "eos_token_id"):
            found.update([ids] if isinstance(ids, int) else ids)
    if eos_token is not None and (token_id := tokenizer.token_to_id(eos_token)) is not None:
        found.add(token_id)
    return frozenset(found)
