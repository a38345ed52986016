"""The pair's tokenizer: byte-level BPE with single digits, ChatML specials and chat template."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 768
MODEL_LENGTH = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD_ID, START_ID, END_ID, MASK_ID = range(4)
# Tokens, but text like any other: the server's parser reads them, so decoding must not skip them.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Qwen's template in short: tools stand in the system message, results in the user's.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function is defined else tool %}
        {{- '\\n{"name": ' + function.name | tojson }}
        {%- if function.description %}
            {{- ', "description": ' + function.description | tojson }}
        {%- endif %}
        {{- ', "parameters": ' + (function.parameters or {}) | tojson + '}' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; the specials get ids 0-3, the marks of tool calls 4-7."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits let a number be read and written place by place.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIALS, *MARKS],
        # Every byte has a token, so any prompt can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIALS
    return Tokenizer.from_str(json.dumps(state))


def system_prompt(system: str | None, tools: Sequence[dict[str, Any]] = ()) -> str:
    """What the chat template makes of a system message and tools; nothing of neither."""
    shown = []
    for tool in tools:
        function = tool["function"]
        named = {key: function[key] for key in ("name", "description") if function.get(key)}
        shown.append(json.dumps(named | {"parameters": function.get("parameters") or {}}))
    text = "\n".join(("# Tools", *shown)) if tools else ""
    if system is not None:
        text = f"{system}\n\n{text}" if tools else system
    elif not tools:
        return ""
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def chat_prompt(
    question: str, system: str | None = None, tools: Sequence[dict[str, Any]] = ()
) -> str:
    """What the chat template makes of one question, up to where the answer begins."""
    before = system_prompt(system, tools)
    return f"{before}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers needs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_LENGTH,
        "eos_token": SPECIALS[END_ID],
        "pad_token": SPECIALS[PAD_ID],
        "mask_token": SPECIALS[MASK_ID],
        "additional_special_tokens": [SPECIALS[START_ID]],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
