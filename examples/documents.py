"""Ask questions of documents: every citation in the answer names a passage that was found.

cairn pull minilm
cairn serve smollm2 minilm      # in another terminal
python examples/documents.py [ADDRESS]
"""

from __future__ import annotations

import sys
from typing import Any

import httpx

DOCUMENTS = {
    "opening.md": "# Opening hours\n\nThe library is open from 9 to 17 on weekdays. On Sundays it is closed.",
    "rules.md": "# Rules\n\nA book may be kept for four weeks. Dogs wait outside.",
}
QUESTION = "How long may I keep a book?"


def main() -> None:
    """Make a collection, put two documents into it, search, ask, and delete it again."""
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with httpx.Client(base_url=address, timeout=600) as server:
        place = f"/v1/collections/{post(server, '/v1/collections', {})['id']}"
        try:
            for name, text in DOCUMENTS.items():
                post(server, f"{place}/documents", {"name": name, "text": text})
            for found in post(server, f"{place}/search", {"query": QUESTION, "top_k": 2})["data"]:
                print(f"{found['score']:.2f} {found['name']}: {' '.join(found['text'].split())}")
            answer = post(server, f"{place}/ask", {"query": QUESTION, "temperature": 0, "max_tokens": 60})
            print(f"\n{QUESTION}\n{answer['answer']}")
            for source in answer["sources"]:
                print(f"[{source['number']}] {source['name']}{'' if source['cited'] else ' (not cited)'}")
        finally:
            server.delete(place).raise_for_status()


def post(server: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """POST JSON; return the answer, or leave with what the server says is wrong."""
    response = server.post(path, json=body)
    if response.is_error:
        raise SystemExit(f"{path}: {response.json()['error']['message']}")
    return response.json()


if __name__ == "__main__":
    main()
