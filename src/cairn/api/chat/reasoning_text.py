"""Reasoning that goes to a client and comes back with its history: as text, or in a field that clients hand on unread.

What a client must not read it still hands on: Anthropic's `signature` of a block whose thinking is omitted, OpenAI's
`encrypted_content`. The text stands there in base64, not encrypted: it is the client's own conversation, and a key
would have to outlive the server. A value of another maker is nothing to this server and is passed over.
"""

from __future__ import annotations

import base64
import binascii

MARK = "cairn1."


def pack(text: str) -> str:
    """The text in a form that is handed on as it is."""
    return MARK + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def unpack(value: object) -> str:
    """The text of a packed value; empty for any other."""
    if not isinstance(value, str) or not value.startswith(MARK):
        return ""
    try:
        return base64.b64decode(value[len(MARK) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
