"""Give a server an agent, go on with it by its name, fork it, and roll it back.

    cairn serve demo                    # in another terminal
    python examples/agents.py [ADDRESS]

The server keeps the agent's history: only the new message is sent. It is there after a restart too, which
examples/remember.py tries with `kill -9`.
"""

from __future__ import annotations

import sys
from typing import Any

import httpx


def main() -> None:
    """Make an agent, tell it something, and ask it in three ways."""
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with httpx.Client(base_url=address, timeout=600) as server:
        agent = post(server, "/v1/agents", {"system": "Be brief."})["id"]
        try:
            print(turn(server, agent, "My name is Ada."))
            fork = post(server, f"/v1/agents/{agent}/fork", {})["id"]
            print(turn(server, agent, "What is my name?"))
            print("the fork:", turn(server, fork, "What is my name?"))
            post(server, f"/v1/agents/{agent}/rollback", {"turn": 1})
            print("again, after turn 1:", turn(server, agent, "What is my name?"))
            server.delete(f"/v1/agents/{fork}").raise_for_status()
        finally:
            server.delete(f"/v1/agents/{agent}").raise_for_status()


def turn(server: httpx.Client, agent: str, text: str) -> str:
    """Tell an agent something; return what it said, and how much of its context was computed for that."""
    asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40}
    answer = post(server, f"/v1/agents/{agent}/turns", asked)
    usage = answer["usage"]
    said = " ".join(answer["choices"][0]["message"]["content"].split())
    return f"{said}   ({usage['prompt_tokens']} tokens in the prompt, {usage['cairn']['computed']} computed)"


def post(server: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """POST JSON; return the answer, or leave with what the server says is wrong."""
    response = server.post(path, json=body)
    if response.is_error:
        raise SystemExit(f"{path}: {response.json()['error']['message']}")
    return response.json()


if __name__ == "__main__":
    main()
