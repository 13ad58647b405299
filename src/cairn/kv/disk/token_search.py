"""The search for a context's chunks by their tokens, for erasures that do not know under which salt they were stored.

Logs of earlier versions do not name the adapters of a turn, on which the salt depends. A chunk's file has its tokens,
and the keys of what extends it follow from its own key, so only the first chunk of each chain is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cairn.kv.disk.budget import DiskState
from cairn.kv.disk.chunk_file import DamagedChunk
from cairn.kv.disk.index import KEY_BYTES, IndexEntry
from cairn.kv.pool.prefix import extend
from cairn.types.model_spec import BLOCK_TOKENS, CHUNK_TOKENS


def chunks_of_tokens(state: DiskState, tokens: Sequence[int], keep: int) -> tuple[set[bytes], bool]:
    """Return the ids that chunks of this context beyond its first `keep` tokens have, with any salt.

    Also return whether all files could be read.
    """
    with state.mutex:
        firsts = [entry for entry in state.index.live() if not entry.parent]
    kept, complete, ids = -(-keep // CHUNK_TOKENS) * CHUNK_TOKENS, True, set[bytes]()
    for entry in firsts:
        try:
            part = state.folder.read_tokens(entry.name)
        except FileNotFoundError:
            continue
        except DamagedChunk:
            state.drop_damaged(entry)
            continue
        except OSError as error:
            state.fail("read", error)
            complete = False
            break
        for end in _ends(entry, part, tokens):
            ids.update(id for at, id in _ids(entry, end, tokens) if at > kept)
    return ids, complete


def _ends(entry: IndexEntry, part: tuple[int, ...], tokens: Sequence[int]) -> Iterator[int]:
    """Yield where a chunk with the tokens `part` ends in a context; nothing if the context does not have it.

    The depth of KV is where it begins, that of a state where it ends.
    """
    for begin in {entry.name.depth, entry.name.depth - len(part)}:
        end = begin + len(part)
        if begin >= 0 and end % BLOCK_TOKENS == 0 and tuple(tokens[begin:end]) == part:
            yield end


def _ids(entry: IndexEntry, end: int, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the id of a chunk that ends after so many tokens, and the ids that its chain has after each block beyond.

    Each with the number of tokens after which it ends.
    """
    key, tag = entry.name.key, entry.id[:-KEY_BYTES]
    yield end, entry.id
    for at in range(end, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        key = extend(key, tokens[at : at + BLOCK_TOKENS])
        yield at + BLOCK_TOKENS, tag + key
