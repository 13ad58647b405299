"""Tiny tokenizers and chat templates of the kinds that models come with, built in memory."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 12:45, isn't it?",
    "def f(x):\n    return {'a': x + 1}\n\n\nprint(f(2))",
    "Größe, Ærø, naïve café — „quoted“ … 100 €",
    "你好世界。こんにちは世界。안녕하세요",
    "emoji 😀👍🏽 family 👨‍👩‍👧 and flags 🇩🇰",
    "user system assistant tool name arguments call think hello there weather city",
    '{"name": "get_weather", "arguments": {"city": "Århus"}}',
]

BYTE_LEVEL_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def byte_level(style: str = "qwen") -> str:
    """Return a tokenizer.json of a byte-level BPE:

    `qwen` (ChatML, no BOS) or `llama3` (headers, BOS by post-processor).
    """
    made = Tokenizer(models.BPE(ignore_merges=style == "llama3"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BYTE_LEVEL_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if style == "qwen":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=500, initial_alphabet=sorted(alphabet)))
    special = {
        "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "llama3": [
            "<|begin_of_text|>",
            "<|eot_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<\uff5codd▁one\uff5c>",
        ],
    }[style]
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    if style == "qwen":
        tags = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]
        made.add_tokens([AddedToken(text, normalized=False) for text in tags])
        made.add_tokens([AddedToken("        ", normalized=False)])
    else:
        bos = "<|begin_of_text|>"
        made.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, made.token_to_id(bos))])
    return made.to_str()


@functools.cache
def sentencepiece(first_only: bool = False) -> str:
    """Return a tokenizer.json like Llama 2's: BPE with byte fallback, control tokens in the vocabulary."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    control = ["<unk>", "<s>", "</s>"]
    units = [f"<0x{byte:02X}>" for byte in range(256)]
    latin = [text.encode("ascii", "ignore").decode() for text in TEXTS]
    made.train_from_iterator(latin * 3, trainers.BpeTrainer(vocab_size=600, special_tokens=[*control, *units]))
    data = json.loads(made.to_str())
    data["added_tokens"] = [added_token for added_token in data["added_tokens"] if added_token["content"] in control]
    # A vocabulary that can spell a control token by itself, as some converted ones can.
    vocab = data["model"]["vocab"]
    for piece in ("<", "s", ">", "s>"):
        vocab.setdefault(piece, len(vocab))
    data["model"]["merges"] += [["s", ">"], ["<", "s>"]]
    if first_only:
        data["normalizer"] = None
        data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    else:
        data["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
        data["pre_tokenizer"] = None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    data["decoder"] = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    return json.dumps(data)


@functools.cache
def unigram(byte_fallback: bool = False) -> str:
    """Return a tokenizer.json of a Unigram model with Metaspace, control tokens in the vocabulary."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    control = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        TEXTS * 3, trainers.UnigramTrainer(vocab_size=300, special_tokens=control, unk_token="<unk>")
    )
    return made.to_str()


@functools.cache
def wordpiece() -> str:
    """Return a tokenizer.json of a WordPiece model: an unusual decoder."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"]))
    return made.to_str()


@functools.cache
def suffix_bpe() -> str:
    """Return a tokenizer.json of a BPE with end-of-word suffixes: another unusual decoder."""
    made = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, end_of_word_suffix="</w>"))
    return made.to_str()


KINDS = {
    "byte-level": byte_level,
    "byte-level-llama3": functools.partial(byte_level, "llama3"),
    "sentencepiece": sentencepiece,
    "sentencepiece-first": functools.partial(sentencepiece, True),
    "unigram": unigram,
    "wordpiece": wordpiece,
}

QWEN_CONFIG = {"eos_token": "<|im_end|>", "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
LLAMA3_CONFIG = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
LLAMA2_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}

QWEN_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call these functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with <tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}\\n</tool_call>" }}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}
                {{- tool_call.function.arguments }}
            {%- else %}
                {{- tool_call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif force_thinking is defined %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Knowledge until: December 2023\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {{- raise_exception("roles must be user and assistant, not " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


def write_model(folder: Path, tokenizer: str, config: dict[str, Any], template: str | None = None) -> Path:
    """Write the text part of a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    data = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        data["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(data), "utf-8")
    return folder
