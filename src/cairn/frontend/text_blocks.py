"""Which KV block ends where a text ends: the link between a request's text, which routers know, and its tokens."""

from __future__ import annotations

from cairn.cluster.kv_events import block_hash
from cairn.cluster.text_prefixes import TextPrefixes
from cairn.frontend.adapter_services import AdaptedService
from cairn.frontend.service import Service
from cairn.kv.pool.cache import lead
from cairn.kv.pool.prefix import Chain, root
from cairn.types.request import Request


def text_blocks(service: Service, request: Request, prefixes: TextPrefixes) -> list[tuple[int, int, int]]:
    """Return (text, block, tokens) for the beginnings of a request's text that fill at least one block.

    Tokens are taken to be spread evenly over the text, so the block is that of about the same place. Empty for a model
    without full attention: where its KV can be used again depends on its snapshots. Takes about 0.1 us a token.
    """
    info = service.base.info if isinstance(service, AdaptedService) else service.info
    size, groups = info.layout.block_tokens, info.layout.groups
    if not groups or groups[lead(groups)].kind != "full":
        return []
    chain = Chain(root(info.identity, request.kv_salt, groups[lead(groups)], size), size)
    found = []
    for text, end in zip(prefixes.digests, prefixes.ends, strict=True):
        count = len(request.prompt) * end // prefixes.size // size
        if count:
            found.append((text, block_hash(chain.key(count - 1, request.prompt)), count * size))
    return found
