"""What the fields of model calls mean. A field means the same in each API that has it, so it is described once.

The served schema, and with it docs/reference/http.md, has these descriptions. Fields that an API takes only with values
that change nothing (`NEUTRAL` beside its bodies) are described there by those values.
"""

from __future__ import annotations

from collections.abc import Mapping

NEUTRAL = "Has no effect; only these values are accepted."
"""The description of a field that is taken only with values that change nothing."""
UNREAD = "Accepted, and not read."

FIELDS: Mapping[str, str] = {
    # what is answered
    "model": "The served model's name.",
    "messages": "The conversation, the oldest message first.",
    "prompt": "A text, or token ids.",
    "input": "A text, or items of the Responses API.",
    "token_ids": "The prompt as token ids.",
    "system": "The system message.",
    "instructions": "The system message.",
    "previous_response_id": "A response of a live session, which this call continues.",
    "tools": "The functions that the model may call.",
    "tool_choice": "Whether the model may, must or must not call a function, or which one it must call.",
    "parallel_tool_calls": "false: at most one call in an answer.",
    "chat_template_kwargs": "Variables for the model's chat template, by name.",
    "add_generation_prompt": "Whether the template opens an answer. Default: unless the last message is continued.",
    "continue_final_message": "The answer continues the last message, which is an assistant's.",
    "add_special_tokens": "Whether a text prompt gets the tokenizer's special tokens.",
    "sampling_params": "How tokens are sampled.",
    # how it is sampled
    "temperature": "Divides the logits before sampling; 0: greedy. Default: 1.",
    "top_p": "Samples from the likeliest tokens that have this probability together. Default: 1, all.",
    "top_k": "Samples from so many of the likeliest tokens. Default: all; 0 and -1 mean the same.",
    "min_p": "Samples from tokens with at least this share of the likeliest one's probability. Default: 0, all.",
    "presence_penalty": "Subtracted from the logit of each token that the answer has already. Default: 0.",
    "frequency_penalty": "Subtracted once for each time that the answer has the token already. Default: 0.",
    "repetition_penalty": "Divides the logits of tokens of prompt and answer. Default: 1.",
    "logit_bias": "Added to logits, by token id.",
    "seed": "Seeds the sampling of this answer, on engines that take seeds: a segment's `seed` is null on others.",
    "n": "How many answers; each is a branch of its session. Default: 1.",
    "max_tokens": "Tokens of the answer at most. Default: what the context has left.",
    "max_completion_tokens": "The same as `max_tokens`.",
    "max_output_tokens": "Tokens of the answer at most. Default: what the context has left.",
    "min_tokens": "Tokens before which the answer does not end.",
    "stop": "Texts that end the answer, and are not part of it.",
    "stop_sequences": "Texts that end the answer, and are not part of it.",
    "stop_token_ids": "Token ids that end the answer, besides the model's own.",
    "ignore_eos": "The model's own end of an answer does not end it.",
    "structured_outputs": "A grammar that the answer has to follow.",
    "response_format": "text, json_object, or json_schema with a schema that the answer has to follow.",
    "text": "`format`: a JSON schema that the answer has to follow.",
    "output_config": "`format`: a JSON schema that the answer has to follow. `effort` has no effect.",
    # how it is returned
    "stream": "Whether the answer comes as server-sent events. Default: false.",
    "stream_options": "`include_usage`: a last event has the usage.",
    "stream_interval": "Tokens in one event at least. Default: what the gateway chooses.",
    "logprobs": "Whether the answer has the logprobs of its tokens; as a number: with so many alternatives.",
    "top_logprobs": "Alternatives beside the logprob of each token.",
    "include": "message.output_text.logprobs: the logprobs of the answer's tokens.",
    "return_token_ids": "Whether the answer has the token ids of prompt and answer.",
    "return_weight_versions": "Whether the answer has the weight version and engine of each span of its tokens.",
    "skip_special_tokens": "Whether special tokens are left out of the text.",
    "detokenize": "Has no effect: answers are token ids.",
    "separate_reasoning": "Reasoning stands in `reasoning_content`; false: in the content, with its marks.",
    "reasoning": "Has no effect beyond values that change nothing: reasoning stands in an item of its own.",
    "thinking": "Sets `enable_thinking` of the chat template, where it has that.",
    # which session it belongs to
    "session_id": "The session, where URL, API key and headers name none.",
    "metadata": "`session_id`: the session, where nothing before names one. In the Messages API: `user_id`.",
    "user": "The session, where nothing else names one, unless `--no-session-from-user`.",
    "history": "For this turn, instead of the session's `history`.",
    "store": "false: the call is not kept for `previous_response_id`.",
    "request_id": UNREAD,
    "cache_salt": UNREAD,
    "priority": UNREAD,
    "prompt_cache_key": UNREAD,
    "prompt_cache_options": UNREAD,
    "prompt_cache_retention": UNREAD,
    "safety_identifier": UNREAD,
    "cache_control": UNREAD,
    "diagnostics": UNREAD,
    "thread": "Refused: send the whole history.",
}
