"""One request of every kind that SGLang's API has, and what of its answer must be equal.

Each kind is sent to plain decoding and to both workers. The table in docs/features.md is made from
what they answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from tests.server.harness import Server, events

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
        "old": {"type": "boolean"},
    },
    "required": ["name", "age", "old"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "sell",
        "parameters": {
            "type": "object",
            "properties": {"eggs": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["eggs"],
            "additionalProperties": False,
        },
    },
}
# What the target writes by itself, so that drafts are accepted under it.
CALCULATION = "[0-9]{1,4}[-+*/][0-9]{1,3}=[0-9]{1,5}"
STRUCTURAL_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<<"],
        "tags": [
            {"begin": "<<", "content": {"type": "regex", "pattern": CALCULATION}, "end": ">>"}
        ],
    },
}


class EveryThirdToken(CustomLogitProcessor):
    """Allows a single token after every third: right only if it sees the tokens before it."""

    def __call__(self, logits, custom_param_list=None):
        for row, param in zip(logits, custom_param_list, strict=True):
            if len(param["__req__"].output_ids) % 3 == 2:
                row[:] = -float("inf")
                row[param["token"]] = 0.0
        return logits


@dataclass(frozen=True)
class Prompt:
    """A problem as each endpoint takes it."""

    question: str
    text: str
    ids: list[int]


@dataclass(frozen=True)
class Feature:
    """A kind of request.

    Attributes:
        fields: of the request, besides the prompt and greedy sampling.
        sampling: sampling parameters, or the fields of an OpenAI request.
        path: endpoint.
        speculates: whether rounds of several tokens must have happened.
        fresh: whether the radix cache must be empty, because the answer shows it.
    """

    name: str
    group: str
    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    path: str = "/generate"
    prompt: Callable[[Prompt], dict] = lambda prompt: {"text": prompt.text}
    speculates: bool = True
    fresh: bool = False

    def ask(self, server: Server, prompt: Prompt) -> Any:
        """The answer, or the sentence with which the request is refused."""
        if self.path == "/generate":
            limits = {"temperature": 0, "max_new_tokens": 96}
            body = {"sampling_params": limits | self.sampling} | self.prompt(prompt) | self.fields
        else:
            limits = {"model": "default", "temperature": 0}
            body = limits | self.prompt(prompt) | self.sampling | self.fields
        with server.post(self.path, body, stream=bool(body.get("stream"))) as response:
            if response.status_code != 200:
                return response.text
            return list(events(response)) if body.get("stream") else response.json()


# Without reasoning, after which alone a grammar would begin.
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}


def _chat(prompt: Prompt) -> dict:
    return {"messages": [{"role": "user", "content": prompt.question}], "max_tokens": 96}


def _completion(prompt: Prompt) -> dict:
    return {"prompt": prompt.text, "max_tokens": 96}


def _chat_feature(name: str, sampling: dict | None = None, **keywords: Any) -> Feature:
    return Feature(
        name, "Chat", sampling or {}, path="/v1/chat/completions", prompt=_chat, **keywords
    )


def _penalty(name: str, value: float, **more: Any) -> Feature:
    return Feature(f"`{name}`", "Sampling", {name: value} | more)


GREEDY = (
    Feature("greedy", "Sampling"),
    _penalty("frequency_penalty", 1.9),
    _penalty("presence_penalty", 2.0),
    _penalty("repetition_penalty", 2.0),
    _penalty("min_new_tokens", 80),
    Feature("`logit_bias`", "Sampling", {"logit_bias": {"300": 5.0, "17": -100.0}}),
    Feature(
        "penalties, bias and minimum together",
        "Sampling",
        {"frequency_penalty": 1.2, "min_new_tokens": 60, "logit_bias": {"20": 1.5}},
    ),
    Feature(
        "custom logit processor",
        "Sampling",
        {"custom_params": {"token": 300}},
        {"custom_logit_processor": EveryThirdToken.to_str()},
        speculates=False,
    ),
    Feature("`n` > 1", "Sampling", {"n": 3}),
    Feature("`max_new_tokens` 1", "End", {"max_new_tokens": 1}, speculates=False),
    Feature("`stop` strings", "End", {"stop": ["makes", ".\n"]}),
    Feature("`stop_token_ids`", "End", {"stop_token_ids": [300, 301, 302, 303]}),
    Feature("`stop_regex`", "End", {"stop_regex": r">>\d+"}),
    Feature("`ignore_eos`", "End", {"ignore_eos": True, "max_new_tokens": 150}),
    Feature("`no_stop_trim`", "End", {"stop": ["makes"], "no_stop_trim": True}),
    Feature("`skip_special_tokens` false", "End", {"skip_special_tokens": False}),
    Feature("`regex`", "Grammar", {"regex": r"[^#]{20,300}#### [0-9]{1,2}"}),
    Feature("`ebnf`", "Grammar", {"ebnf": 'root ::= [^#]+ "#### " [0-9] [0-9]'}),
    Feature("`structural_tag`", "Grammar", {"structural_tag": json.dumps(STRUCTURAL_TAG)}),
    Feature("`json_schema`", "Grammar", {"json_schema": json.dumps(SCHEMA)}, speculates=False),
    Feature("`return_logprob`", "Log-probabilities", fields={"return_logprob": True}),
    Feature(
        "prompt and top log-probabilities, `token_ids_logprob`",
        "Log-probabilities",
        fields={
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 3,
            "token_ids_logprob": [5, 9],
            "return_text_in_logprobs": True,
        },
        fresh=True,
    ),
    Feature(
        "`logprob_start_len`",
        "Log-probabilities",
        {"repetition_penalty": 1.5},
        {"return_logprob": True, "logprob_start_len": 7, "top_logprobs_num": 2},
        fresh=True,
    ),
    Feature(
        "`return_hidden_states`",
        "Input and output",
        {"max_new_tokens": 30},
        {"return_hidden_states": True},
        fresh=True,
    ),
    Feature("`input_ids`", "Input and output", prompt=lambda p: {"input_ids": p.ids}),
    Feature(
        "a batch in one request",
        "Input and output",
        prompt=lambda p: {"text": [p.text, p.text[:-40], p.text[:60]]},
    ),
    Feature("stream", "Input and output", fields={"stream": True}),
    Feature("`priority`", "Input and output", fields={"priority": 3}),
    _chat_feature("chat"),
    _chat_feature("stream", {"stream": True, "stream_options": {"include_usage": True}}),
    _chat_feature("`logprobs`", {"logprobs": True, "top_logprobs": 3}),
    _chat_feature(
        "`response_format`: JSON object", {"response_format": {"type": "json_object"}} | AT_ONCE
    ),
    _chat_feature(
        "`response_format`: JSON schema",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            }
        }
        | AT_ONCE,
    ),
    _chat_feature(
        "tools, `tool_choice` required", {"tools": [TOOL], "tool_choice": "required"} | AT_ONCE
    ),
    _chat_feature("tools, `tool_choice` auto", {"tools": [TOOL]}),
    _chat_feature("reasoning apart", {"separate_reasoning": True}),
    Feature("completion", "Completions", path="/v1/completions", prompt=_completion),
    Feature(
        "`echo` and `logprobs`",
        "Completions",
        {"echo": True, "logprobs": 2},
        path="/v1/completions",
        prompt=_completion,
        fresh=True,
    ),
    Feature(
        "response",
        "Responses",
        {"max_output_tokens": 60},
        path="/v1/responses",
        prompt=lambda p: {"input": p.question},
    ),
)

REFUSED = (
    Feature("`image_data`", "Input and output", fields={"image_data": ["picture.png"]}),
    Feature("`return_routed_experts`", "Input and output", fields={"return_routed_experts": True}),
    Feature("`lora_path`", "Input and output", fields={"lora_path": "somewhere"}),
)


# Fields that differ from request to request, and those that speculation adds.
_OWN = {"id", "created", "rid", "e2e_latency", "weight_version", "created_at", "completed_at"}
_OWN |= {
    "cached_tokens",
    "cached_tokens_details",
    "prompt_tokens_details",
    "metadata",
    "input_tokens_details",
}
_TIMES = ("_ts", "_time", "_latency", "_throughput")


def comparable(answer: Any) -> Any:
    """An answer without ids, times and what speculation adds.

    The chunks of a stream become what they say in all: a chunk holds a round, not a token.
    """
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        if "choices" in answer[0]:
            return _joined_chat(answer)
        if "output_ids" in answer[0] and answer[-1]["output_ids"] != answer[0]["output_ids"]:
            answer = answer[-1] if _is_stream(answer) else answer
    return _stripped(answer)


def _is_stream(answer: list[dict]) -> bool:
    return answer[0]["meta_info"]["id"] == answer[-1]["meta_info"]["id"]


def _joined_chat(chunks: list[dict]) -> dict:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    texts = {
        name: "".join(delta.get(name) or "" for delta in deltas)
        for name in ("content", "reasoning_content")
    }
    return _stripped(texts | {"finish_reason": reasons[-1], "usage": chunks[-1]["usage"]})


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _stripped(inner)
            for name, inner in value.items()
            if name not in _OWN and not name.startswith("spec_") and not name.endswith(_TIMES)
            if not _is_id(name, inner)
        }
    if isinstance(value, list):
        return [_stripped(inner) for inner in value]
    return value


def _is_id(name: str, value: Any) -> bool:
    """Random ids of tool calls and responses."""
    return name.endswith("id") and isinstance(value, str)
