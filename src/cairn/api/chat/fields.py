"""Fields that clients send and this server ignores: one table, by place and by whose field it is.

A field without `values` may hold anything, since leaving it out never changes the meaning of an answer. One with
`values` has a meaning that is not built: these values ask for nothing, and any other is a 400 with the reason `why`.
Null counts as absent for every field, known or not. docs/clients.md shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cairn.api.http.body import Place


class FieldRow(NamedTuple):
    """Fields of one kind."""

    names: str
    """The names of the fields, separated by blanks."""
    why: str
    """They have no effect, or no other value is accepted."""
    values: tuple[Any, ...] | None = None
    """Accepted values; None: any."""


_IDS = "names that a client gives for its own use"
_CACHED = "every prefix is kept, without being asked"
_SAMPLER = "this sampler is not built"
_FORM = "this form of the answer is not built"
_NATIVE = "/completion and /infill have it"
_THOUGHT = "the reasoning of another API, in its own form"

ACCEPTED: Mapping[Place, Mapping[str, tuple[FieldRow, ...]]] = {
    "request": {
        "OpenAI": (
            FieldRow("user safety_identifier", "names the user; not evaluated"),
            FieldRow("service_tier", "all requests are served alike"),
            FieldRow("prompt_cache_options prompt_cache_retention", _CACHED),
            FieldRow("verbosity", "no switch of local models; ask for brevity in the prompt"),
            FieldRow("modalities", "answers are text", (["text"],)),
            FieldRow("audio", "answers are text", ()),
            FieldRow("functions", "send tools, which took their place", ([],)),
            FieldRow("function_call", "send tool_choice, which took its place", ("auto", "none")),
            FieldRow("web_search_options", "this server does not search the web", ()),
            FieldRow("moderation", "nothing here judges texts", ()),
            FieldRow("suffix", "it belongs to /v1/completions", ("",)),
            FieldRow("best_of", "ask for n answers and choose", (1,)),
        ),
        "llama.cpp": (
            FieldRow("cache_prompt id_slot slot_id n_cache_reuse n_keep", _CACHED),
            FieldRow(
                "conv_id sse_ping_interval",
                "streams are kept awake by --heartbeat and followed again by `X-Cairn-Resumable`",
            ),
            FieldRow("adaptive_decay", "sets a sampler that is off"),
            FieldRow("tfs_z", _SAMPLER, (1,)),
            FieldRow("adaptive_target", _SAMPLER, (-1,)),
            FieldRow("repeat_last_n", "penalties look at the whole context; 64 is what clients send unasked", (-1, 64)),
            FieldRow("penalize_nl", "line breaks are penalised like other tokens, or by logit_bias", (True,)),
            FieldRow("min_keep n_discard n_indent", _FORM, (0,)),
            FieldRow("n_probs", _NATIVE, (0,)),
            FieldRow("t_max_predict_ms", "an answer ends with the time of the server's request_timeout", (0, -1)),
            FieldRow("parse_tool_calls", "calls are read where tools are offered", (True,)),
            FieldRow("reasoning_format", "reasoning is separated from content", ("auto", "deepseek")),
            FieldRow("reasoning_control post_sampling_probs backend_sampling", _FORM, (False,)),
            FieldRow("return_tokens", _NATIVE, (False,)),
            FieldRow("response_fields", _NATIVE, ([],)),
        ),
        "vLLM, SGLang": (
            FieldRow("request_id", "the server gives its own"),
            FieldRow("add_generation_prompt", "a prompt ends where the answer begins", (True,)),
            FieldRow("continue_final_message", "a prompt ends where the answer begins", (False,)),
            FieldRow("skip_special_tokens spaces_between_special_tokens", "control tokens are no text", (True,)),
            FieldRow("include_stop_str_in_output no_stop_trim", "a stop string is no part of an answer", (False,)),
            FieldRow("use_beam_search early_stopping", "beam search is not built", (False,)),
            FieldRow("length_penalty", "beam search is not built", (1,)),
            FieldRow("detokenize", _FORM, (True,)),
            FieldRow("return_token_ids return_tokens_as_token_ids", _FORM, (False,)),
            FieldRow(
                "include_reasoning separate_reasoning stream_reasoning", "reasoning is separated and sent", (True,)
            ),
            FieldRow("logits_processors documents", "not built", ([],)),
            FieldRow("chat_template", "the template is the model's, or the server's --chat-template", ()),
            FieldRow("guided_decoding_backend guided_whitespace_pattern", "there is one way to hold answers to a form"),
        ),
        "mlx_lm": (
            FieldRow("draft_model num_draft_tokens", "a hint that changes the speed alone"),
            FieldRow("adapters", "name an adapter in `model`, as MODEL:NAME", ("", "default_model")),
            FieldRow(
                "repetition_context_size presence_context_size frequency_context_size",
                "penalties look at the whole context; 20 is what clients send unasked",
                (20,),
            ),
            FieldRow("role_mapping", "the template is the model's, or the server's --chat-template", ({},)),
        ),
        "Ollama": (
            FieldRow("keep_alive", "a model stays loaded"),
            FieldRow("format", "say response_format, which holds answers to JSON or to a schema", ("",)),
            FieldRow("options", "options stand beside the messages", ({},)),
        ),
        "OpenRouter, LiteLLM, Open WebUI": (
            FieldRow("session_id chat_id conversation_id", _IDS),
            FieldRow("provider route transforms usage", "asks a router, and there is none"),
            FieldRow("plugins models", "asks a router, and there is none", ([],)),
            FieldRow("top_a", _SAMPLER, (0,)),
        ),
    },
    "messages": {
        "Anthropic": (
            FieldRow("cache_control", _CACHED),
            FieldRow("betas anthropic_beta anthropic_version", "what betas add is accepted, and built or passed over"),
            FieldRow("context_management", "nothing is cleared of a context; the client may"),
            FieldRow("container inference_geo service_tier speed user_profile_id workspace_id", "all are served alike"),
            FieldRow("mcp_servers", "this server calls no others", ([],)),
            FieldRow("prefill", "answers begin anew", ()),
        ),
    },
    "responses": {
        "OpenAI": (
            FieldRow("user", "names the user; not evaluated"),
            FieldRow("access_programs", "all requests are served alike"),
            FieldRow("prompt_cache_retention", _CACHED),
            FieldRow("truncation", "nothing is cut; what is too long is refused with `context_length_exceeded`"),
            FieldRow("context_management", "nothing is compacted unasked; the client may"),
            FieldRow("stream_options", "padding against eavesdroppers, which TLS in front may do"),
            FieldRow("client_metadata", _IDS),
            FieldRow("image", "images are not read here"),
            FieldRow("prompt", "prompts are not kept here; send instructions and input", ()),
            FieldRow("moderation", "nothing here judges texts", ()),
            FieldRow("n", "a response has one answer", (1,)),
        ),
    },
    "ollama": {
        "Ollama": (
            FieldRow("keep_alive", "how long one of several models stays loaded; the only one stays"),
            FieldRow("truncate shift", "nothing is cut; a prompt that is too long is refused"),
            FieldRow("template", "the template is the model's, or the server's --chat-template", ("",)),
            FieldRow("images", "this model reads texts alone", ([],)),
            FieldRow("width height steps", "images are not made here", (0,)),
        ),
    },
    "options": {
        "Ollama": (
            FieldRow("num_keep num_batch num_thread numa", "how the server computes is an option of its own"),
            FieldRow("num_gpu main_gpu low_vram f16_kv", "how the server computes is an option of its own"),
            FieldRow(
                "use_mmap use_mlock vocab_only logits_all embedding_only", "how a model is loaded is no request's"
            ),
            FieldRow("tfs_z", _SAMPLER, (1,)),
            FieldRow("repeat_last_n", "penalties look at the whole context; 64 is what clients send unasked", (-1, 64)),
            FieldRow("penalize_newline", "line breaks are penalised like other tokens", (True,)),
        ),
    },
    "model": {
        "Ollama": (
            FieldRow("insecure", "the hub is spoken to by TLS alone"),
            FieldRow("verbose system template options", "all that is known is shown"),
            FieldRow("username password", "a gated model needs HF_TOKEN in the server's environment"),
        ),
    },
    "embedding": {
        "OpenAI": (FieldRow("user safety_identifier", "names the user; not evaluated"),),
        "Cohere, Jina": (
            FieldRow("input_type task", "say prompt_name, by the names of the model's own prompts", ()),
            FieldRow("max_chunks_per_doc max_tokens_per_doc rank_fields late_chunking", _FORM, ()),
            FieldRow("embedding_type", "say encoding_format", ("float",)),
            FieldRow("embedding_types", "say encoding_format", (["float"],)),
        ),
        "TEI": (FieldRow("truncation_direction", "texts are cut at their end", ("right", "Right")),),
        "vLLM, SGLang": (
            FieldRow("request_id", "the server gives its own"),
            FieldRow("priority", "texts take their turn", (0,)),
            FieldRow("add_special_tokens", "a text gets what its model was trained on", (True,)),
            FieldRow("truncate_prompt_tokens", "say truncate", ()),
            FieldRow("embed_dtype endianness", _FORM, ("float32", "native", "little")),
        ),
        "Ollama": (
            FieldRow("keep_alive", "how long one of several models stays loaded; the only one stays"),
            FieldRow("options", "options stand beside the texts", ({},)),
        ),
    },
    "tokenize": {
        "vLLM, SGLang": (
            FieldRow("add_generation_prompt", "a chat ends where the answer begins", (True,)),
            FieldRow("continue_final_message return_token_strs", "not built", (False,)),
        ),
    },
    "stream_options": {
        "OpenAI": (FieldRow("include_obfuscation", "padding against eavesdroppers, which TLS in front may do"),),
        "vLLM, SGLang": (FieldRow("continuous_usage_stats", _FORM, (False,)),),
    },
    "message": {
        "OpenAI": (
            FieldRow("id status", "of the item that a message was in another API"),
            FieldRow("annotations", "remarks about the text; the text says what it says"),
            FieldRow("parsed", "what openai-python made of the text"),
            FieldRow("type", "a message", ("message",)),
            FieldRow("refusal", "a refusal is content here", ("",)),
            FieldRow("audio", "messages are text", ()),
            FieldRow("function_call", "send tool_calls, which took its place", ()),
        ),
        "Anthropic, OpenRouter, LiteLLM": (
            FieldRow("cache_control", _CACHED),
            FieldRow("is_error", "the text of a result says what went wrong"),
            FieldRow("reasoning_details thinking_blocks", _THOUGHT),
            FieldRow("metadata extra provider_specific_fields", _IDS),
        ),
        "Ollama, Open WebUI": (
            FieldRow("tool_name timestamp created_at index model", _IDS),
            FieldRow("images", "messages are text", ([],)),
        ),
        "DeepSeek, Mistral": (FieldRow("prefix partial", "answers begin anew", (False,)),),
    },
    "part": {
        "OpenAI": (
            FieldRow("prompt_cache_breakpoint", _CACHED),
            FieldRow("id status index", "of the item that a part was in another API"),
            FieldRow("annotations logprobs", "remarks about the text; the text says what it says"),
        ),
        "Anthropic, OpenRouter, LiteLLM": (
            FieldRow("cache_control", _CACHED),
            FieldRow("citations is_error", "remarks about the text; the text says what it says"),
            FieldRow("reasoning_details thinking_blocks", _THOUGHT),
            FieldRow("metadata extra provider_specific_fields", _IDS),
        ),
    },
    "tool": {
        "OpenAI": (
            FieldRow("id status", _IDS),
            FieldRow("strict", "it stands in `function`", (False,)),
        ),
        "Anthropic, OpenRouter, LiteLLM": (
            FieldRow("cache_control", _CACHED),
            FieldRow("defer_loading eager_input_streaming", "the model gets all tools at once"),
            FieldRow("is_error reasoning_details thinking_blocks", "of an answer; a tool has none"),
            FieldRow("metadata extra", _IDS),
        ),
    },
    "function": {
        "Anthropic, OpenRouter, LiteLLM": (
            FieldRow("cache_control", _CACHED),
            FieldRow("id metadata extra", _IDS),
        ),
    },
    "call": {
        "OpenAI": (FieldRow("status", "of the item that a call was in another API"),),
        "Gemini": (FieldRow("extra_content thought_signature", "of the reasoning of another API"),),
        "Anthropic, OpenRouter, LiteLLM": (
            FieldRow("cache_control", _CACHED),
            FieldRow("is_error", "the text of a result says what went wrong"),
            FieldRow("reasoning_details thinking_blocks", _THOUGHT),
            FieldRow("metadata extra provider_specific_fields", _IDS),
        ),
    },
    "called": {
        "OpenAI": (FieldRow("parsed_arguments", "what openai-python made of the arguments"),),
        "Anthropic, OpenRouter, LiteLLM": (FieldRow("id metadata extra provider_specific_fields", _IDS),),
    },
}
"""Rows by place and by whose field it is."""

ROWS: Mapping[Place, Mapping[str, FieldRow]] = {
    place: {name: row for rows in dialects.values() for row in rows for name in row.names.split()}
    for place, dialects in ACCEPTED.items()
}
"""The rows by name."""


def asks_for_nothing(row: FieldRow, value: Any) -> bool:
    """Return whether a field of the row may have this value."""
    return row.values is None or any(_same(value, one) for one in row.values)


def _same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 1.0 equals 1, and true does not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
