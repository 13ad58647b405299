"""The agents that `cairn launch` starts: one table of how each is configured for the server.

A text may contain {url}, {model}, {key}, {context}, {answer}, {prompt} and {folder}: the server's address, its model,
an API key, tokens of its context, of an answer and of a prompt, and Cairn's folder for the agent's files. A text that
is only {context}, {answer} or {prompt} becomes the number. The user's own files are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """One agent, and how it is started."""

    title: str
    program: str
    install: str
    """The command that installs it."""
    first_prompt: tuple[int, int] = (0, 0)
    """Measured tokens of its first request, at least and at most; (0, 0): few, or not known."""
    env: Mapping[str, str | Json] = field(default_factory=dict)
    """Variables; an object is written as JSON."""
    arguments: tuple[str, ...] = ()
    authorities: str = "NODE_EXTRA_CA_CERTS"
    """The variable that names a file of certificates to trust, for a server that speaks https."""
    files: Mapping[str, Json] = field(default_factory=dict)
    """Files in {folder}, by name, as JSON."""


_OPENCODE_MODEL = {"name": "{model}", "tool_call": True, "limit": {"context": "{context}", "output": "{answer}"}}

AGENTS: Mapping[str, AgentProgram] = {
    "claude": AgentProgram(
        title="Claude Code",
        program="claude",
        first_prompt=(17_000, 32_000),
        install="npm install -g @anthropic-ai/claude-code",
        env={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{answer}",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a prompt line that changes with every session
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",  # a prompt line that changes with every tool call
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_FEEDBACK_SURVEY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_FEEDBACK_COMMAND": "1",
        },
    ),
    "codex": AgentProgram(
        title="codex",
        program="codex",
        first_prompt=(13_000, 13_000),
        authorities="SSL_CERT_FILE",
        install="npm install -g @openai/codex",
        env={"CODEX_CAIRN_KEY": "{key}"},
        arguments=(
            *("-c", 'model_provider="cairn"', "-c", 'model="{model}"', "-c", "model_context_window={context}"),
            *("-c", 'model_providers.cairn.name="Cairn"', "-c", 'model_providers.cairn.base_url="{url}/v1"'),
            *("-c", 'model_providers.cairn.wire_api="responses"'),
            *("-c", 'model_providers.cairn.env_key="CODEX_CAIRN_KEY"'),
        ),
    ),
    "opencode": AgentProgram(
        title="opencode",
        program="opencode",
        first_prompt=(11_000, 11_000),
        install="npm install -g opencode-ai",
        env={
            "OPENCODE_CONFIG_CONTENT": {
                "provider": {
                    "cairn": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "Cairn",
                        "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
                        "models": {"{model}": _OPENCODE_MODEL},
                    }
                },
                "model": "cairn/{model}",
                "small_model": "cairn/{model}",
            }
        },
    ),
    "qwen": AgentProgram(
        title="qwen-code",
        program="qwen",
        first_prompt=(28_000, 28_000),
        install="npm install -g @qwen-code/qwen-code",
        env={
            "OPENAI_BASE_URL": "{url}/v1",
            "OPENAI_API_KEY": "{key}",
            "OPENAI_MODEL": "{model}",
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": "{folder}/settings.json",
        },
        arguments=("--auth-type", "openai"),
        files={
            "settings.json": {
                "model": {"name": "{model}", "generationConfig": {"contextWindowSize": "{context}"}},
                "privacy": {"usageStatisticsEnabled": False},
            }
        },
    ),
    "copilot": AgentProgram(
        title="GitHub Copilot CLI",
        program="copilot",
        first_prompt=(17_000, 17_000),
        install="npm install -g @github/copilot",
        env={
            "COPILOT_PROVIDER_BASE_URL": "{url}/v1",
            "COPILOT_PROVIDER_API_KEY": "{key}",
            "COPILOT_MODEL": "{model}",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "{prompt}",
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "{answer}",
            "COPILOT_OFFLINE": "true",  # speaks to this server alone: no account, no telemetry
        },
    ),
    "aider": AgentProgram(
        title="aider",
        program="aider",
        authorities="SSL_CERT_FILE",
        install="python -m pip install aider-install && aider-install",
        env={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}"},
        arguments=(
            *("--model", "openai/{model}", "--weak-model", "openai/{model}"),
            *("--model-metadata-file", "{folder}/models.json", "--no-show-model-warnings"),
        ),
        files={
            "models.json": {
                "openai/{model}": {
                    "max_input_tokens": "{context}",
                    "max_output_tokens": "{answer}",
                    "input_cost_per_token": 0,
                    "output_cost_per_token": 0,
                    "litellm_provider": "openai",
                    "mode": "chat",
                }
            }
        },
    ),
    "pi": AgentProgram(
        title="pi",
        program="pi",
        install="npm install -g @mariozechner/pi-coding-agent",
        env={"PI_CODING_AGENT_DIR": "{folder}"},
        arguments=("--provider", "cairn", "--model", "{model}"),
        files={
            "models.json": {
                "providers": {
                    "cairn": {
                        "baseUrl": "{url}/v1",
                        "api": "openai-completions",
                        "apiKey": "{key}",
                        "models": [{"id": "{model}", "contextWindow": "{context}", "maxTokens": "{answer}"}],
                    }
                }
            }
        },
    ),
}
