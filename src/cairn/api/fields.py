"""Fields that clients send and this server has no use for: one table, by place and by whose field it is.

A field without `values` may hold anything, since leaving it out never changes what an answer means. One with `values`
has a meaning that is not built: these ask for nothing, and every other value is a 400 that says `why`. Null is as if a
field were absent, of every field, known or not. docs/clients.md shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cairn.api.schemas import Place


class Row(NamedTuple):
    """Fields of one kind."""

    names: str
    """The names of the fields, separated by blanks."""
    why: str
    """They have no effect, or no other value is accepted."""
    values: tuple[Any, ...] | None = None
    """What is accepted; None: anything."""


_IDS = "names that a client gives for its own use"
_CACHED = "every prefix is kept, without being asked"
_SAMPLER = "this sampler is not built"
_FORM = "this form of the answer is not built"
_THOUGHT = "the reasoning of another API, in its own form"

ACCEPTED: Mapping[Place, Mapping[str, tuple[Row, ...]]] = {
    "request": {
        "OpenAI": (
            Row("user safety_identifier", "who asks; nobody here judges them"),
            Row("service_tier", "all requests are served alike"),
            Row("prediction", "a hint that changes the speed alone"),
            Row("prompt_cache_options prompt_cache_retention", _CACHED),
            Row("verbosity", "no switch of local models; ask for brevity in the prompt"),
            Row("modalities", "answers are text", (["text"],)),
            Row("audio", "answers are text", ()),
            Row("functions", "send tools, which took their place", ([],)),
            Row("function_call", "send tool_choice, which took its place", ("auto", "none")),
            Row("web_search_options", "this server does not search the web", ()),
            Row("moderation", "nothing here judges texts", ()),
            Row("suffix", "it belongs to /v1/completions", ("",)),
            Row("best_of", "ask for n answers and choose", (1,)),
        ),
        "llama.cpp": (
            Row("cache_prompt id_slot slot_id n_cache_reuse n_keep", _CACHED),
            Row(
                "conv_id sse_ping_interval",
                "streams are kept awake by --heartbeat and followed again by `X-Cairn-Resumable`",
            ),
            Row("adaptive_decay", "sets a sampler that is off"),
            Row("tfs_z", _SAMPLER, (1,)),
            Row("adaptive_target", _SAMPLER, (-1,)),
            Row("repeat_last_n", "penalties look at the whole context; 64 is what clients send unasked", (-1, 64)),
            Row("penalize_nl", "line breaks are penalised like other tokens, or by logit_bias", (True,)),
            Row("min_keep n_discard n_indent n_probs", _FORM, (0,)),
            Row("t_max_predict_ms", "an answer ends with the time of the server's request_timeout", (0, -1)),
            Row("lora", "adapters are not built", ([],)),
            Row("parse_tool_calls", "calls are read where tools are offered", (True,)),
            Row("reasoning_format", "reasoning is told apart from content", ("auto", "deepseek")),
            Row("reasoning_control post_sampling_probs return_tokens backend_sampling", _FORM, (False,)),
            Row("response_fields", _FORM, ([],)),
        ),
        "vLLM, SGLang": (
            Row("request_id", "the server gives its own"),
            Row("add_generation_prompt", "a prompt ends where the answer begins", (True,)),
            Row("continue_final_message", "a prompt ends where the answer begins", (False,)),
            Row("skip_special_tokens spaces_between_special_tokens", "control tokens are no text", (True,)),
            Row("include_stop_str_in_output no_stop_trim", "a stop string is no part of an answer", (False,)),
            Row("use_beam_search early_stopping", "beam search is not built", (False,)),
            Row("length_penalty", "beam search is not built", (1,)),
            Row("detokenize", _FORM, (True,)),
            Row("return_token_ids return_tokens_as_token_ids", _FORM, (False,)),
            Row("include_reasoning separate_reasoning stream_reasoning", "reasoning is told apart and sent", (True,)),
            Row("logits_processors documents", "not built", ([],)),
            Row("chat_template", "the template is the model's, or the server's --chat-template", ()),
            Row("guided_decoding_backend guided_whitespace_pattern", "there is one way to hold answers to a form"),
        ),
        "Ollama": (
            Row("keep_alive", "a model stays loaded"),
            Row("format", "answers cannot be held to JSON or to a schema yet", ("",)),
            Row("options", "options stand beside the messages", ({},)),
        ),
        "OpenRouter, LiteLLM, Open WebUI": (
            Row("session_id chat_id conversation_id", _IDS),
            Row("provider route transforms usage", "asks a router, and there is none"),
            Row("plugins models", "asks a router, and there is none", ([],)),
        ),
    },
    "messages": {
        "Anthropic": (
            Row("cache_control", _CACHED),
            Row("betas anthropic_beta anthropic_version", "what betas add is accepted, and built or passed over"),
            Row("context_management", "nothing is cleared of a context; the client may"),
            Row("container inference_geo service_tier speed user_profile_id workspace_id", "all are served alike"),
            Row("mcp_servers", "this server calls no others", ([],)),
            Row("prefill", "answers begin anew", ()),
        ),
    },
    "responses": {
        "OpenAI": (
            Row("user safety_identifier", "who asks; nobody here judges them"),
            Row("service_tier access_programs", "all requests are served alike"),
            Row("prompt_cache_retention", _CACHED),
            Row("truncation", "nothing is cut; what is too long is refused with `context_length_exceeded`"),
            Row("max_tool_calls", "of tools that run on a server; `file_search` alone does, once"),
            Row("context_management", "nothing is compacted unasked; the client may"),
            Row("stream_options", "padding against eavesdroppers, which TLS in front may do"),
            Row("client_metadata", _IDS),
            Row("image", "images are not read here"),
            Row("prompt", "prompts are not kept here; send instructions and input", ()),
            Row("moderation", "nothing here judges texts", ()),
            Row("n", "a response has one answer", (1,)),
        ),
    },
    "ollama": {
        "Ollama": (
            Row("keep_alive", "how long one of several models stays loaded; the only one stays"),
            Row("truncate shift", "nothing is cut; a prompt that is too long is refused"),
            Row("template", "the template is the model's, or the server's --chat-template", ("",)),
            Row("images", "this model reads texts alone", ([],)),
            Row("width height steps", "images are not made here", (0,)),
        ),
    },
    "options": {
        "Ollama": (
            Row("num_keep num_batch num_thread numa", "how the server computes is an option of its own"),
            Row("num_gpu main_gpu low_vram f16_kv", "how the server computes is an option of its own"),
            Row("use_mmap use_mlock vocab_only logits_all embedding_only", "how a model is loaded is no request's"),
            Row("tfs_z", _SAMPLER, (1,)),
            Row("repeat_last_n", "penalties look at the whole context; 64 is what clients send unasked", (-1, 64)),
            Row("penalize_newline", "line breaks are penalised like other tokens", (True,)),
        ),
    },
    "model": {
        "Ollama": (
            Row("insecure", "the hub is spoken to by TLS alone"),
            Row("verbose system template options", "all that is known is shown"),
            Row("username password", "a gated model needs HF_TOKEN in the server's environment"),
        ),
    },
    "embedding": {
        "OpenAI": (Row("user safety_identifier", "who asks; nobody here judges them"),),
        "Cohere, Jina": (
            Row("input_type task", "say prompt_name, by the names of the model's own prompts", ()),
            Row("max_chunks_per_doc max_tokens_per_doc rank_fields late_chunking", _FORM, ()),
            Row("embedding_type", "say encoding_format", ("float",)),
            Row("embedding_types", "say encoding_format", (["float"],)),
        ),
        "TEI": (Row("truncation_direction", "texts are cut at their end", ("right", "Right")),),
        "vLLM, SGLang": (
            Row("request_id", "the server gives its own"),
            Row("priority", "texts take their turn", (0,)),
            Row("add_special_tokens", "a text gets what its model was trained on", (True,)),
            Row("truncate_prompt_tokens", "say truncate", ()),
            Row("embed_dtype endianness", _FORM, ("float32", "native", "little")),
        ),
        "Ollama": (
            Row("keep_alive", "how long one of several models stays loaded; the only one stays"),
            Row("options", "options stand beside the texts", ({},)),
        ),
    },
    "tokenize": {
        "vLLM, SGLang": (
            Row("add_generation_prompt", "a chat ends where the answer begins", (True,)),
            Row("continue_final_message return_token_strs", "not built", (False,)),
        ),
    },
    "stream_options": {
        "OpenAI": (Row("include_obfuscation", "padding against eavesdroppers, which TLS in front may do"),),
        "vLLM, SGLang": (Row("continuous_usage_stats", _FORM, (False,)),),
    },
    "message": {
        "OpenAI": (
            Row("id status", "of the item that a message was in another API"),
            Row("annotations", "remarks about the text; the text says what it says"),
            Row("parsed", "what openai-python made of the text"),
            Row("type", "a message", ("message",)),
            Row("refusal", "a refusal is content here", ("",)),
            Row("audio", "messages are text", ()),
            Row("function_call", "send tool_calls, which took its place", ()),
        ),
        "Anthropic, OpenRouter, LiteLLM": (
            Row("cache_control", _CACHED),
            Row("is_error", "the text of a result says what went wrong"),
            Row("reasoning_details thinking_blocks", _THOUGHT),
            Row("metadata extra provider_specific_fields", _IDS),
        ),
        "Ollama, Open WebUI": (
            Row("tool_name timestamp created_at index model", _IDS),
            Row("images", "messages are text", ([],)),
        ),
        "DeepSeek, Mistral": (Row("prefix partial", "answers begin anew", (False,)),),
    },
    "part": {
        "OpenAI": (
            Row("prompt_cache_breakpoint", _CACHED),
            Row("id status index", "of the item that a part was in another API"),
            Row("annotations logprobs", "remarks about the text; the text says what it says"),
        ),
        "Anthropic, OpenRouter, LiteLLM": (
            Row("cache_control", _CACHED),
            Row("citations is_error", "remarks about the text; the text says what it says"),
            Row("reasoning_details thinking_blocks", _THOUGHT),
            Row("metadata extra provider_specific_fields", _IDS),
        ),
    },
    "tool": {
        "OpenAI": (
            Row("id status", _IDS),
            Row("strict", "it stands in `function`", (False,)),
        ),
        "Anthropic, OpenRouter, LiteLLM": (
            Row("cache_control", _CACHED),
            Row("defer_loading eager_input_streaming", "all tools are told at once"),
            Row("is_error reasoning_details thinking_blocks", "of an answer; a tool has none"),
            Row("metadata extra", _IDS),
        ),
    },
    "function": {
        "Anthropic, OpenRouter, LiteLLM": (
            Row("cache_control", _CACHED),
            Row("id metadata extra", _IDS),
        ),
    },
    "call": {
        "OpenAI": (Row("status", "of the item that a call was in another API"),),
        "Gemini": (Row("extra_content thought_signature", "of the reasoning of another API"),),
        "Anthropic, OpenRouter, LiteLLM": (
            Row("cache_control", _CACHED),
            Row("is_error", "the text of a result says what went wrong"),
            Row("reasoning_details thinking_blocks", _THOUGHT),
            Row("metadata extra provider_specific_fields", _IDS),
        ),
    },
    "called": {
        "OpenAI": (Row("parsed_arguments", "what openai-python made of the arguments"),),
        "Anthropic, OpenRouter, LiteLLM": (Row("id metadata extra provider_specific_fields", _IDS),),
    },
}
"""Place -> whose field it is -> rows."""

ROWS: Mapping[Place, Mapping[str, Row]] = {
    place: {name: row for rows in dialects.values() for row in rows for name in row.names.split()}
    for place, dialects in ACCEPTED.items()
}
"""The rows by name."""


def asks_for_nothing(row: Row, value: Any) -> bool:
    """Whether a field of the row may have this value."""
    return row.values is None or any(_same(value, one) for one in row.values)


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; 1.0 is 1, and true is not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
