"""Responses in the record of live sessions: found by id, for calls that continue them, and read back by clients."""

from __future__ import annotations

from typing import Any

from gateway.api.errors import BadField
from gateway.api.responses.form import ID_PREFIX, items
from gateway.api.responses.items import INSTRUCTIONS, as_items, carried
from gateway.api.responses.schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
)
from gateway.core.types import TurnId
from gateway.ports import Message, SessionView, Turns
from gateway.tokens.bridge import content_text
from protos.errors import NotFound

LIMIT_MAX = 100
"""Items of one answer, as at OpenAI."""


def recorded(turns: Turns, response_id: str) -> tuple[SessionView, TurnId]:
    """The session of a response and its turn. Raises NotFound."""
    turn_id = TurnId(response_id.removeprefix(ID_PREFIX))
    view = turns.session_of_turn(turn_id)
    if not response_id.startswith(ID_PREFIX):
        hint = f"the id of a response begins with {ID_PREFIX}, as POST /v1/responses answers it"
    elif view is None:
        hint = (
            "it is kept until its session ends, not at all with `store`: false; send the whole conversation as `input`"
        )
    elif view.ephemeral:
        hint = "it was sent with `store`: false, and is not kept; send the whole conversation as `input`"
    elif not view.tree.turns[turn_id].messages:
        hint = "its turn was sent as token ids or text, and has no messages; send the whole conversation as `input`"
    else:
        return view, turn_id
    raise NotFound(f"no response {response_id!r:.160}", hint=hint)


def conversation_of(view: SessionView, turn_id: TurnId) -> list[Message]:
    """The messages up to the end of a turn, its answer the last one."""
    return [message for turn in view.tree.path(view.tree.turns[turn_id]) for message in turn.messages]


def response_of(view: SessionView, turn_id: TurnId, model: str) -> ResponseObject:
    """What is recorded of a response: its items, its usage, and the tools and instructions of its prompt."""
    turn = view.tree.turns[turn_id]
    head, conversation = view.tree.path(turn)[0].head or {}, conversation_of(view, turn_id)
    answer, complete = conversation[-1], turn.finish_reason == "stop"
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls") or ()
    ]
    prompt, sampled = turn.start + len(turn.prompt_ids), len(turn.token_ids)
    return ResponseObject(
        id=f"{ID_PREFIX}{turn_id}",
        created_at=int(turn.segments[0].started_unix_s) if turn.segments else 0,
        status="completed" if complete else "incomplete",
        incomplete_details=None if complete else IncompleteDetails("max_output_tokens"),
        model=model,
        output=items(
            turn_id,
            answer.get("reasoning_content") or "",
            content_text(answer.get("content")),
            calls,
            "completed" if complete else "incomplete",
        ),
        usage=ResponseUsage(prompt, sampled, prompt + sampled, InputTokensDetails(), OutputTokensDetails()),
        previous_response_id=None if turn.parent is None else f"{ID_PREFIX}{turn.parent}",
        instructions=next((content_text(m["content"]) for m in conversation if m.get(INSTRUCTIONS)), None),
        tools=[_tool(tool) for tool in head.get("tools") or ()],
    )


def items_of(
    view: SessionView, turn_id: TurnId, order: str, limit: str, after: str | None
) -> tuple[list[dict[str, Any]], int]:
    """The items that a response was answered to, up to `limit`, behind the one of the id `after`, and how many are
    left out. BadField for another order or limit than OpenAI's, and for an unknown id."""
    if order not in ("asc", "desc"):
        raise BadField("order", f"`order` is {order!r:.40}", hint="asc or desc")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= LIMIT_MAX):
        raise BadField("limit", f"`limit` is {limit!r:.40}", hint=f"1 to {LIMIT_MAX}")
    found = [
        {"id": f"item_{turn_id}_{number}", **item}
        for number, item in enumerate(
            item for message in carried(conversation_of(view, turn_id)[:-1]) for item in as_items(message)
        )
    ]
    shown = found if order == "asc" else found[::-1]
    if after is not None:
        ids = [item["id"] for item in shown]
        if after not in ids:
            raise BadField("after", f"`after` is {after!r:.80}, and no item has that id")
        shown = shown[ids.index(after) + 1 :]
    return shown[: int(limit)], max(0, len(shown) - int(limit))


def _tool(tool: Message) -> dict[str, Any]:
    return {"type": "function", **tool["function"]}
