"""Deliberate bugs, each applied alone, that the simulator must find: the score that says what the laws are worth.

A bug is one snippet of source that is replaced by another; the snippet must occur exactly once, so a bug cannot
silently do nothing. Each runs in a forked process over freshly imported modules, until a law breaks or 2,000 schedules
(200 of the disk store and 100 of the token log, each of which opens hundreds of disks, 25 of agents, and 20 texts for
the check of codecs) have passed. It is found if the same schedule passes without the bug.

    python -m tests.laws.planted_bugs [name ...]
"""

# ruff: noqa: E501  a snippet is quoted as it stands
from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SOURCE = Path(__file__).parents[2] / "src" / "cairn"
SCHEDULERS, STREAMS, STORAGE, CODECS, SAMPLING, TOKEN_LOG, AGENTS = SIMULATORS = (
    "tests.laws.simulator",
    "tests.laws.streams",
    "tests.laws.storage",
    "tests.laws.codecs",
    "tests.laws.sampling",
    "tests.laws.token_log",
    "tests.laws.agents",
)
SCHEDULES = {SCHEDULERS: 2000, STREAMS: 2000, STORAGE: 200, CODECS: 20, SAMPLING: 2000, TOKEN_LOG: 100, AGENTS: 25}
FIRST = {
    "a load that stands still is never late": 1864,
    "a chunk is queued before what it extends": 1498,
    "a load is never late": 652,
    "a lost chunk is read over": 466,
    "the report counts what was loaded twice": 466,
    "the memory store drops a chunk and keeps what extends it": 166,
    "leftovers that could not be removed stay": 133,
    "a sync that failed is not repeated": 46,
    "compaction drops what only an unsynced record replaces": 36,
    "chunks of a deleted agent's abandoned branches stay": 12,
    "what was sampled in an agent's name outlives it": 7,
}
"""Seeds that are tried first because they found the bug when all were tried in order, to save minutes."""
STUCK_SECONDS = 60
"""A single schedule that takes so long hangs; that counts as found."""


@dataclass(frozen=True)
class Bug:
    """What is wrong, in which file, and the snippet that makes it so."""

    name: str
    file: str
    old: str
    new: str

    def source(self) -> str:
        """The file with the bug in it."""
        text = (SOURCE / self.file).read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: the snippet must occur exactly once in {self.file}: {self.old!r}")
        return text.replace(self.old, self.new)

    @property
    def module(self) -> str:
        return "cairn." + self.file.removesuffix(".py").replace("/", ".")


BLOCKS = "kv/blocks.py"
PREFIX = "kv/prefix.py"
CACHE = "kv/cache.py"
ATTENTION_WINDOW = "kv/attention_window.py"
SEQUENCE_KV = "kv/sequence_kv.py"
TIERS = "kv/tiers.py"
WRITE_BEHIND = "kv/write_behind.py"
STORE_WRITER = "kv/store_writer.py"
STORE_READER = "kv/store_reader.py"
RAM = "kv/ram.py"
SCHEDULER = "scheduler.py"
PLAN = "plan.py"

SEQUENCE = "sequence.py"
WAITING = "waiting.py"
FAKE = "engine/fake.py"
STOPS = "text/stops.py"
TEXT = "text/stream.py"
BYTES = "text/detokenizer.py"
FLIGHT = "service/flight.py"
WORKER = "service/worker.py"
CHECK = "kv/codec_check.py"
VOCABULARY = "kernels/vocabulary.py"
DISK = "kv/disk.py"
STATE = "kv/disk_state.py"
DISK_WRITER = "kv/disk_writer.py"
DISK_INDEX = "kv/disk_index.py"
FOLDER = "kv/store_folder.py"
CHUNKS = "kv/chunk_file.py"
PINS = "kv/pins.py"
DISK_MAINTENANCE = "kv/disk_maintenance.py"
LOG = "agents/log.py"
SEGMENT = "agents/segment.py"
INDEX = "agents/index.py"
LOG_FOLDER = "agents/folder.py"
RECOVERY = "agents/recovery.py"
COMPACTION = "agents/compaction.py"
RECORDS = "agents/records.py"
AGENT_SERVICE = "agents/agent_service.py"
AGENT_REGISTRY = "agents/agent_registry.py"
TURN_TREE = "agents/turn_tree.py"
RUNNING = "agents/running.py"
WRITER = "agents/writer.py"
AGENT_KV = "agents/kv.py"

BUGS = (
    # ------------------------------------------------------------------------------------------------ block pool
    Bug("taken blocks are not held", BLOCKS, "self._holders[block] = 1", "self._holders[block] = 0"),
    Bug("a shared block is freed by its first user", BLOCKS, "            if self._holders[block] == 0:\n                if self", "            if True:\n                if self"),
    Bug("a held block stays evictable", BLOCKS, "            del self._cached[block]\n", "            pass\n"),
    Bug("a cached block is also free", BLOCKS, "                if self._published[block] is None:\n                    self._free", "                if True:\n                    self._free"),
    Bug("the newest block is evicted first", BLOCKS, "block = next(iter(self._cached))", "block = next(reversed(self._cached))"),
    Bug("an evicted block is still found", BLOCKS, "        del self._index[published.key]\n        self._published[block] = None\n        return block", "        self._published[block] = None\n        return block"),
    Bug("an evicted block keeps its key", BLOCKS, "        del self._index[published.key]\n        self._published[block] = None\n        return", "        del self._index[published.key]\n        return"),
    Bug("the second publisher replaces the first", BLOCKS, "if key not in self._index:", "if True:"),
    Bug("an adopted block is not held", BLOCKS, "            self.hold(twin)\n", ""),
    Bug("a block whose twin is adopted leaks", BLOCKS, "            self.release((block,))\n", ""),
    Bug("one more block is promised than there is", BLOCKS, "return len(self._free) + len(self._cached)", "return len(self._free) + len(self._cached) + 1"),
    # ---------------------------------------------------------------------------------------------- keys and hits
    Bug("a key forgets what came before its block", PREFIX, "hashlib.sha256(parent + struct", "hashlib.sha256(struct"),
    Bug("tenants share keys", PREFIX, "(_DOMAIN, identity, salt, group", "(_DOMAIN, identity, group"),
    Bug("a whole-prompt hit leaves nothing to compute", CACHE, "hit = (len(tokens) - 1) // self._block_tokens if most", "hit = len(tokens) // self._block_tokens if most"),
    Bug("the last block of a whole-prompt hit is not copied", PLAN, "                engine.write_blocks(group, [target], engine.read_blocks(group, [source]).wait()).wait()\n", "                pass\n"),
    Bug("the last block is copied for the first group only", CACHE, "enumerate(context.tables):\n            if (block", "enumerate(context.tables[:1]):\n            if (block"),
    Bug("the last block of a whole-prompt hit is copied a plan too late", SCHEDULER, "        copies = self._cache.copies()\n        if not work", "        copies, self._late = getattr(self, '_late', []), self._cache.copies()\n        if not work"),
    Bug("a hit ignores missing window blocks", CACHE, "            if gap is None:\n", "            if True:\n"),
    Bug("a window hit skips too far", CACHE, "            hit = gap\n", "            return gap\n"),
    Bug("a window is one position too short", ATTENTION_WINDOW, "position - group.window + 1", "position - group.window + 2"),
    Bug("a window is one block too short", ATTENTION_WINDOW, "return max(0, position - group.window + 1) // block_tokens if", "return -(-max(0, position - group.window + 1) // block_tokens) if"),
    # ----------------------------------------------------------------------------------------- open, grow, publish
    Bug("a passed block stays in the table", CACHE, "            table[index] = NO_BLOCK\n", "            break\n"),
    Bug("a passed block is never given back", CACHE, "index = first_read(group, computed, self._block_tokens) - 1", "index = -1"),
    Bug("a partly filled block is published", CACHE, "        full = computed // self._block_tokens\n", "        full = min(len(tokens), computed + 1) // self._block_tokens\n"),
    Bug("the room of the second pool is not checked", CACHE, "for pool, table in pairs):", "for pool, table in pairs[:1]):"),
    Bug("blocks are given back first to last", CACHE, "for block in reversed(table) if", "for block in table if"),
    Bug("an open that finds no room keeps what it held", CACHE, "                self.close(context, tokens)\n                return False\n", "                return False\n"),
    Bug("room is counted before the hit is held", CACHE, "        self._hold_prefix(context, tokens, hit)\n        wanted", "        wanted"),
    Bug("the table keeps the block that was released for its twin", CACHE, "                    table[done] = block\n", ""),
    Bug("a hit is published again", CACHE, "            context.published[number] = hit\n", ""),
    Bug("capacity is that of the longest table", CACHE, "context.capacity = min(", "context.capacity = max("),
    Bug("a closed context still claims to compute", CACHE, "        self._unclaim(context, tokens, context.claimed.stop)\n", ""),
    Bug("published blocks are still claimed", CACHE, "        self._unclaim(context, tokens, context.published[0])\n", ""),
    Bug("equal prompts do not wait for each other", CACHE, "return context.patience >= 0", "return False"),
    Bug("a window needs one block less than it does", ATTENTION_WINDOW, "// block_tokens) + 1 if group.kind", "// block_tokens) if group.kind"),
    Bug("a window hit counts its held blocks twice", CACHE, "min(wanted, span - held)", "min(wanted, span)"),
    # -------------------------------------------------------------------------------------------------- scheduler
    Bug("a preempted sequence believes in its old progress", SCHEDULER, "            victim.computed = 0\n", ""),
    Bug("a preempted sequence keeps its blocks", SCHEDULER, "            self._cache.close(victim.kv, victim.tokens)\n", ""),
    Bug("the oldest sequence is preempted", SCHEDULER, "victim = max(", "victim = min("),
    Bug("a victim of this plan grows again", SCHEDULER, "        if sequence.state is not State.RUNNING:\n            return\n        start", "        start"),
    Bug("a victim of this plan keeps its row", SCHEDULER, "        if self._preemptions != preemptions:\n            work = {", "        if False:\n            work = {"),
    Bug("decode rows are not counted in the budget", SCHEDULER, "Room(self._step_tokens - len(work), ", "Room(self._step_tokens, "),
    Bug("a step's budget ignores time", SCHEDULER, "self._pace.tokens(len(work))", "math.inf"),
    Bug("a slow machine reads no prompt", PLAN, "max(self._least, max(", "max(0, max("),
    Bug("time is short where nobody waits", PLAN, "if not rows or not self._each:", "if not self._each:"),
    Bug("on a slow machine a long prompt takes all the time", PLAN, "self._most - self._most // 2, ENOUGH", "self._most, ENOUGH"),
    Bug("what a long prompt leaves on a slow machine is nobody's", PLAN, "min(self._most - self.taken, most - self._long)", "0"),
    Bug("one row too many", SCHEDULER, "len(self._running) + passed.any >= self._max_rows", "len(self._running) > self._max_rows"),
    Bug("nobody joins while others run", SCHEDULER, "            if room.left < 1 or", "            if self._running or room.left < 1 or"),
    Bug("a small request overtakes one that does not fit", SCHEDULER, "                if covered is None:\n                    break\n", "                if covered is None:\n                    continue\n"),
    Bug("a long prompt leaves short ones no room", SCHEDULER, "            room.keep_half()\n", "            pass\n"),
    Bug("a long prompt gets nothing beside short ones", PLAN, "self._most - self._most // 2, ENOUGH", "0, ENOUGH"),
    Bug("deadlines are not looked at", SCHEDULER, "        if now < self._next_deadline:", "        if True:"),
    Bug("a deadline is reported as success", SCHEDULER, "self._fail(sequence, now, FinishReason.DEADLINE)", "self._fail(sequence, now, FinishReason.LENGTH)"),
    Bug("the next deadline is forgotten", SCHEDULER, "self._next_deadline = min((s.deadline for s in self._sequences.values()), default=math.inf)", "self._next_deadline = math.inf"),
    Bug("a dropped request gets its result", SCHEDULER, "            if sequence.state is not State.RUNNING:\n                continue\n", ""),
    Bug("requests survive an engine that raised", SCHEDULER, "results = [RowResult(error=error)] * len(plan.rows)", "return outputs"),
    Bug("what a failed row computed is published", SCHEDULER, "        if result.error:\n            return self._fail(sequence, now, FinishReason.ERROR, result.error)\n", "        if result.error:\n            self._cache.publish(sequence.kv, sequence.tokens, row.end)\n            return self._fail(sequence, now, FinishReason.ERROR, result.error)\n"),
    Bug("a finished request is kept", SCHEDULER, "        del self._sequences[sequence.request.id]\n", ""),
    Bug("blocks are published before the step has run", SCHEDULER, "        rows = [sequence.row(end) for sequence, end in work.items()]\n", "        rows = [sequence.row(end) for sequence, end in work.items()]\n        for sequence, end in work.items():\n            self._cache.publish(sequence.kv, sequence.tokens, end)\n"),
    Bug("scored prompts use cached tokens", SCHEDULER, "reuse = sequence.scored >= sequence.to_score", "reuse = True"),
    Bug("prompt logprobs are sent again after preemption", SCHEDULER, "        sequence.scored += len(result.prompt_logprobs)\n", ""),
    Bug("a cache report with every token", SCHEDULER, "        if sequence.first_token is None:\n", "        if True:\n"),
    Bug("the covered prefix is computed again", SCHEDULER, "                sequence.computed = covered\n", "                sequence.computed = 0\n"),
    Bug("a sampled token is lost", SCHEDULER, "            tokens = (result.token,)\n", "            tokens = (result.token,) if end % 7 else ()\n"),
    Bug("progress stops at the end of a chunk", SCHEDULER, "        end = sequence.computed = row.end\n", "        end = row.end\n        sequence.computed = min(end, row.start + 8)\n"),
    Bug("a stop token is passed over", SEQUENCE, "            return FinishReason.STOP\n", "            pass\n"),
    Bug("stop tokens count before min_tokens", SEQUENCE, "in sampling.stop_token_ids and count > sampling.min_tokens", "in sampling.stop_token_ids and sampling.min_tokens < 3"),
    Bug("one token more than max_tokens", SEQUENCE, "count >= sampling.max_tokens", "count > sampling.max_tokens"),
    Bug("one token more than the context", SEQUENCE, "len(self.tokens) >= self.limit", "len(self.tokens) > self.limit"),
    Bug("the choice is not passed on", SEQUENCE, "            request.choice,\n", "            0,\n"),
    Bug("a continuation starts over", SEQUENCE, "[*request.prompt, *request.generated]", "[*request.prompt]"),
    Bug("a continuation's tokens count as prompt", SEQUENCE, "self.prompt_len = len(request.prompt)", "self.prompt_len = len(self.tokens)"),
    Bug("priorities are ignored", SEQUENCE, "now - request.priority * AGE_SECONDS", "now"),
    Bug("logits are wanted in the middle of a prompt", SEQUENCE, "first = end - 1 if end == len(self.tokens) else None", "first = end - 1"),
    Bug("the queue is last in, first out", WAITING, "insort(self._items, sequence, key=Sequence.by_rank)", "self._items.insert(0, sequence)"),
    Bug("the queue takes one too many", WAITING, "if waiting < self._max_requests", "if waiting <= self._max_requests"),
    Bug("what was long once is long for ever", WAITING, "if self._step > sequence.long_until:", "if sequence.long_until < 0:"),
    Bug("the queue does not count tokens", WAITING, "and (not waiting or queued + tokens <= self._max_tokens)", ""),
    # ------------------------------------------------------------------------------------------------- the engine
    Bug("the digest before is read one slot off", FAKE, "(row.start - 1) % size for row", "row.start % size for row"),
    Bug("attention reads past the window", FAKE, "            if group.window:\n                values[starts]", "            if False:\n                values[starts]"),
    Bug("attention reads past the position", FAKE, "            values[ends] &= self._until[[position % size for _, position in wanted]]\n", ""),
    Bug("positions restart at every chunk", FAKE, "self._salt[first : row.end] + self._seeds", "self._salt[first - row.start : row.end - row.start] + self._seeds"),
    # ------------------------------------------------------------------------------------------------------- tiers
    Bug("a loaded page is not written", TIERS, "            self._engine.write_blocks(chunk.group, blocks, pages[CHUNK_BLOCKS - len(blocks) :]).wait()\n", ""),
    Bug("a load that begins inside a chunk takes its first pages", TIERS, "pages[CHUNK_BLOCKS - len(blocks) :]", "pages[: len(blocks)]"),
    Bug("a load that ended keeps its blocks", TIERS, "        if over or (load.over and not load.arrived):\n            self._cache.close(context, tokens)\n", "        if over or (load.over and not load.arrived):\n            self._cache.close(context, tokens) if not load.landed else self._loads.pop(context)\n"),
    Bug("a load is never late", TIERS, "if load.landed == before and self.load_policy.late(load, self.reader.alive) and not load.over:", "if False:"),
    Bug("a buffer is read into while its chunk waits", STORE_READER, "        return Arrival(tuple(chunks)", "        self._buffers += buffers\n        return Arrival(tuple(chunks)"),
    Bug("the store in memory keeps what lies in a buffer", STORE_READER, "dataclasses.replace(chunk, pages=bytes(chunk.pages))", "chunk"),
    Bug("a load that stands still is never late", STORE_READER, "        if now - max(load.started, load.heard, alive) > STALL_SECONDS:\n            return True\n", ""),
    Bug("nobody hears that a load has ended", TIERS, "        self._answers += load.done\n", ""),
    Bug("a load goes on for a sequence that has ended", CACHE, "            self.below.stop(context)\n", "            pass\n"),
    Bug("a sequence runs while it is loaded", CACHE, "        if context.loading:\n            return True\n", ""),
    Bug("a load takes blocks that are not there", CACHE, "        if any(more > self.pools[number].available for number in groups):\n            return False\n", ""),
    Bug("blocks that a load skips are taken all the same", CACHE, "self.pools[number].take(more) if number in groups else [NO_BLOCK] * more", "self.pools[number].take(more)"),
    Bug("a lost chunk is read over", STORE_READER, "        if arrival is None or load.fetched == len(load.wants):", "        load.fetched += arrival is None\n        if load.fetched >= len(load.wants):"),
    Bug("the report counts what was loaded twice", SEQUENCE_KV, "Brought(first, min(last, begin), where) for", "Brought(first, last, where) for"),
    Bug("the report counts what was loaded beyond the prompt", SEQUENCE_KV, "max(0, min(end, covered) - begin)", "end - begin"),
    Bug("a chunk is written under the key of the next", WRITE_BEHIND, "Chunk(key, parent, part, index * width, b\"\", number), blocks", "Chunk(chain.key(last - 1, tokens), parent, part, index * width, b\"\", number), blocks"),
    Bug("a chunk of another group is read", WRITE_BEHIND, "self._engine.read_blocks(chunk.group, found)", "self._engine.read_blocks(0, found)"),
    Bug("a chunk is written with the pages that are left of it", WRITE_BEHIND, "return found if len(found) == len(blocks) else None", "return found or None"),
    Bug("the queue has no bound", WRITE_BEHIND, "self.bytes + size <= self._limits.queue_bytes or (not self.bytes and len(line) == 1)", "True"),
    Bug("the queue counts what was written for ever", WRITE_BEHIND, "        self.bytes -= size\n", "        pass\n"),
    Bug("what the pool gives up waits for ever", WRITE_BEHIND, "            pool.leaving = self._leaving\n", "            pass\n"),
    Bug("a chunk is queued before what it extends", WRITE_BEHIND, "            for one in reversed(line):\n", "            for one in line:\n"),
    Bug("a chunk that was given up is waited for", WRITE_BEHIND, "self._lose(self._outstanding.pop(noted.chunk.key))", "self._lose(self._outstanding[noted.chunk.key])"),
    Bug("a copied chunk waits in the pool, too", WRITE_BEHIND, "        self._unnote(chunk.key)\n        pages", "        pages"),
    Bug("a chunk is noted whose blocks are gone", WRITE_BEHIND, "        if self._find(noted) is None:\n", "        if False:\n"),
    Bug("a flush does not wait for the queue", WRITE_BEHIND, "while self._waiting and oldest() >= self._waiting[0].before:", "while self._waiting:"),
    Bug("a flush does not say what was given up", WRITE_BEHIND, "flush.done(flush.lost)", "flush.done(0)"),
    Bug("the memory store keeps a chunk without its parent", RAM, "orphan = bool(chunk.parent) and chunk.parent not in self._chunks", "orphan = False"),
    Bug("the memory store evicts a chunk before what extends it", RAM, "for key in self._leaves if", "for key in self._chunks if"),
    Bug("the memory store evicts what is about to be extended", RAM, "if key != parent and not", "if not"),
    Bug("the memory store drops a chunk and keeps what extends it", RAM, "                waiting += self._children.get(key, ())\n", ""),
    Bug("the memory store grows without bound", RAM, "while self._stats.bytes + size > self._stats.budget:", "while False:"),
    Bug("a miss is not reported", SEQUENCE, "            miss=miss,\n", "            miss=None,\n"),
    # ------------------------------------------------------------------------------------------------- streaming
    Bug("the beginning of a stop string is shown", STOPS, "else self._start_of_partial(text)", "else len(text)"),
    Bug("a stop string is shown", STOPS, "keep = min(found)[1] if found", "keep = len(text) if found"),
    Bug("text goes on after a stop string", STOPS, "        self.hit = bool(found)\n", ""),
    Bug("held text is lost at the end", TEXT, "(held := self._stops.release())", "(held := \"\")"),
    Bug("an unfinished character is lost at the end", TEXT, "pieces = self._split(self._detokenizer.flush())", "pieces = []"),
    Bug("tokens past a stop are counted", TEXT, "            if self.stopped:\n                break\n", ""),
    Bug("known tokens are reported again", TEXT, "            self.tokens = []\n", ""),
    Bug("a character split over tokens becomes two", BYTES, "return self._decoder.decode(b\"\".join([table[i] for i in ids if i not in skip]))", "return self._decoder.decode(b\"\".join([table[i] for i in ids if i not in skip]), final=True)"),
    Bug("tokens that were read are read again", FLIGHT, "tokens, self._unread = self._unread, []", "tokens = self._unread"),
    Bug("events that were taken are taken again", FLIGHT, "            events = joined(events)\n        self._events = []\n", "            events = joined(events)\n"),
    Bug("merging turns the order round", FLIGHT, "text=\"\".join(delta.text for delta in deltas)", "text=\"\".join(delta.text for delta in reversed(deltas))"),
    Bug("merging loses logprobs", FLIGHT, "self._logprobs.take(len(event.tokens))", "self._logprobs.take(1)"),
    Bug("prompt logprobs come again after a worker's death", FLIGHT, "output.prompt_logprobs[self.skip :]", "output.prompt_logprobs"),
    Bug("the next worker starts from the beginning", FLIGHT, "generated=tuple(self.tokens)", "generated=self.request.generated"),
    Bug("the next worker starts the clock again", FLIGHT, "timeout = max(0.0, timeout - (now - self.arrived))", "timeout = max(0.0, timeout)"),
    Bug("a token with logprobs travels as a token only", WORKER, "not (output.finish or output.logprobs or", "not (output.finish or"),
    # ------------------------------------------------------------------------------------------------ the disk store
    Bug("a chunk is not synced", FOLDER, "                file.sync()\n                return temporary, max(", "                return temporary, max("),
    Bug("the names of chunks are not synced", DISK_WRITER, "return self._state.sync(folder.path(one.name).parent for one in written)", "return True"),
    Bug("a chunk that could not be written is reported", DISK_WRITER, "for chunk in plan.work[:kept])", "for chunk in plan.work)"),
    Bug("the room for a chunk stays reserved", DISK_WRITER, "            state.reserved -= one.reserved\n            state.index.add(", "            state.index.add("),
    Bug("what a chunk extends may go while it is written", DISK_WRITER, "                        state.index.hold(one)\n                        plan.held.append(one)\n", "                        pass\n"),
    Bug("a write that failed leaves its file", FOLDER, "            self.discard(temporary, sum(len(part) for part in parts))\n            raise\n", "            raise\n"),
    Bug("leftovers are kept at a start", FOLDER, "if entry.name.startswith(_TEMPORARY) and not entry.folder:", "if False:"),
    Bug("pins do not protect", DISK_INDEX, " and entry.id not in self._pinned\n", "\n"),
    Bug("a chunk is evicted before what extends it", DISK_INDEX, "entry.live and not entry.children and", "entry.live and"),
    Bug("uses are not noted", DISK_INDEX, "        if now > entry.used:\n", "        if False:\n"),
    Bug("a use that was inherited is forgotten at a restart", STATE, "            self._note_use(parent)\n", "            pass\n"),
    Bug("uses are forgotten at a restart", DISK_MAINTENANCE, "                state.folder.files.touch(state.folder.path(entry.name), entry.used + ahead)\n", "                pass\n"),
    Bug("what lost its last extension never becomes a leaf", DISK_INDEX, "            parent.children.discard(entry.id)\n", ""),
    Bug("the bytes of removed chunks are counted for ever", DISK_INDEX, "        self.bytes -= entry.disk\n", ""),
    Bug("dropping leaves what extends a chunk", DISK_INDEX, "                waiting += entry.children\n", ""),
    Bug("the store does not compare tokens", DISK, "if chunk.tokens != tuple(tokens):", "if False:"),
    Bug("leading keys are counted over a hole", DISK, "                if entry is None:\n                    break\n", "                if entry is None:\n                    continue\n"),
    Bug("a damaged chunk is found again", DISK, "            state.drop_damaged(entry)\n            return None\n", "            return None\n"),
    Bug("what was dropped comes back after a power cut", DISK, "        state.sync(sorted({state.folder.digit(id[len(self._tag) :]) for id in touched}))\n", ""),
    Bug("pins are forgotten at a restart", DISK, "                    state.index.pin(name, ids)\n", "                    pass\n"),
    Bug("pins are forgotten in a power cut", PINS, "        self._folder.files.sync_folder(self._path)\n", ""),
    Bug("the checksum of pages is not looked at", CHUNKS, "if xxhash.xxh3_128_digest(view[pages_at:]) != header.pages_check:", "if False:"),
    Bug("another chunk's file is believed", CHUNKS, "    if said != name:\n", "    if False:\n"),
    Bug("chunks being written are not in the budget", STATE, "self.folder.littered + self.reserved + need", "self.folder.littered + need"),
    Bug("the chunk that comes in is not in the budget", STATE, "self.reserved + need - self.budget", "self.reserved - self.budget"),
    Bug("the store grows into the reserve", STATE, "need - max(free - self._reserve, freed) if need else 0", "0"),
    Bug("a disk that works again is not tried", STATE, "        with self.mutex:\n            self._trouble = \"\"\n", "        pass\n"),
    Bug("a file that could not be removed is forgotten", STATE, "                    entry.going = False\n", "                    pass\n"),
    Bug("a sync that failed is not repeated", STATE, "                self.fail(\"write\", error)\n                return False\n", "                self.fail(\"write\", error)\n                self._unsynced.clear()\n                return False\n"),
    Bug("evictions are not counted", STATE, "                self.count(evicted=cleared)\n", ""),
    Bug("orphans stay on the disk", DISK_MAINTENANCE, "    return found.junk + [(state.folder.path(entry.name), entry.disk) for entry in entries.values()]\n", "    return found.junk\n"),
    Bug("leftovers that could not be removed stay", DISK_MAINTENANCE, "        for folder in state.folder.tidy():\n", "        for folder in ():\n"),
    # the check of codecs
    Bug("agreement is of the tokens that were read", CHECK, "one.top[0][0] == other.top[0][0]", "one.token == other.token"),
    Bug("agreement is with the text", CHECK, "one.top[0][0] == other.top[0][0]", "other.top[0][0] == other.token"),
    Bug("agreement is counted where they differ", CHECK, "one.top[0][0] == other.top[0][0]", "one.top[0][0] != other.top[0][0]"),
    Bug("what a codec made of the pages is not read", CHECK, "        engine.write_blocks(group, ids, views).wait()\n", ""),
    Bug("raw is compared with raw", CHECK, "    coded = _read(engine, codec, tokens)\n", "    coded = plain\n"),
    Bug("a divergence forgets how likely a token is", CHECK, "found.append(p * (log_p", "found.append((log_p"),
    Bug("the best place counts for the worst", CHECK, "apart[-1 - len(apart) // 100]", "apart[len(apart) // 100]"),
    Bug("perplexities change places", CHECK, "        _perplexity(plain),\n        _perplexity(coded),\n", "        _perplexity(coded),\n        _perplexity(plain),\n"),
    Bug("a window's blocks are taken from the wrong place", CHECK, "[place % pool for place in range(first, first + CHUNK_BLOCKS)]", "[place % pool for place in range(CHUNK_BLOCKS)]"),
    # ---------------------------------------------------------------------------------------------- the token log
    Bug("a turn's end is not synced", LOG, "                if sync:\n                    self._sync()\n", ""),
    Bug("a segment's name is not synced", LOG_FOLDER, "            self._files.replace(temporary, self.name(header.number))\n            self.sync()\n", "            self._files.replace(temporary, self.name(header.number))\n"),
    Bug("a segment gets its name before it is synced", LOG_FOLDER, "            file.sync()\n            self._files.replace(temporary, self.name(header.number))\n            self.sync()\n", "            self._files.replace(temporary, self.name(header.number))\n            self.sync()\n"),
    Bug("after a sync that failed the segment is synced again", LOG, "            except OSError as error:\n                self._abandon()\n", "            except OSError as error:\n"),
    Bug("what was not synced is lost with its segment", LOG, "[*self._unsynced, *records]", "list(records)"),
    Bug("what only the system's memory holds is relied on", RECOVERY, "segment.dirty |= damaged > 0 or last != SEAL", "segment.dirty |= damaged > 0"),
    Bug("a segment that was given up counts as sound", LOG, "            self._active.dirty = True\n", ""),
    Bug("a number is given out twice after a restart", LOG, "itertools.count(1 + max(found.records, default=0))", "itertools.count(max(found.records, default=1))"),
    Bug("a record's checksum is not looked at", SEGMENT, "if data[at + len(head) : start] != _record_sum(header.seed, offset, head, payload):", "if False:"),
    Bug("reading ends at the first damage", SEGMENT, "        at = data.find(mark, at + 1)\n        if at < 0:\n            break\n", "        break\n"),
    Bug("only the first copy of a header is read", SEGMENT, "for start in (0, _COPY):", "for start in (0,):"),
    Bug("the copy of a header lies where no release put it", SEGMENT, "_COPY = 4096", "_COPY = 2048"),
    Bug("a field that old records lack is required", RECORDS, "    engine: bytes = b\"\"\n", "    engine: bytes\n"),
    Bug("an older record replaces a newer one", INDEX, "if old.lsn(old_offset) > record.lsn:", "if False:"),
    Bug("pieces count beside the end of their turn", INDEX, "                    one.drop(piece_offset)\n", "                    pass\n"),
    Bug("old segments go before the new one is there", COMPACTION, "    if records:\n        _make(", "    for number in numbers:\n        folder.remove(number)\n        folder.sync()\n        folder.create(segments[number].header, b\"\").close()\n    if records:\n        _make("),
    Bug("compaction forgets where a record lies now", INDEX, "                self._places[record.kind].put(record.key, number, offset)\n", "                pass\n"),
    Bug("compaction drops what only an unsynced record replaces", LOG, "        self.write((), sync=True)  # before what it supersedes is dropped\n", ""),
    Bug("compaction drops a record that cannot be read now", COMPACTION, "        if keep_all:\n", "        if False:\n"),
    Bug("an erasure is not written down before it begins", LOG, "        self.write([Record(self.next_lsn(), Kind.ERASE, 0, encode_keys(wanted))], sync=True)\n", ""),
    Bug("a start does not finish an erasure", LOG, "                self._erasing.update(decode_keys(record.payload))\n", "                pass\n"),
    Bug("an erasure spares what was superseded", INDEX, "not (keys.isdisjoint(self._superseded) and keys.isdisjoint(self._keys))", "not keys.isdisjoint(self._keys)"),
    Bug("an erasure spares a segment that cannot be read", COMPACTION, "for ending in (DAMAGED, NEW, LOG):", "for ending in (NEW, LOG):"),
    Bug("an erasure is told before the names are synced", LOG, "        self._folder.sync()\n        self._index.forget", "        self._index.forget"),
    Bug("what is erased is written anew", COMPACTION, "if key not in erasing}", "}"),
    # -------------------------------------------------------------------------------------------------------- agents
    Bug("a message is not on the disk before its answer", AGENT_SERVICE, "            await self.pending.sync(record)\n", "            self.writer.append(record)\n"),
    Bug("a turn's end is told before it is on the disk", RUNNING, "            await self._keeper.sync()\n", ""),
    Bug("the log's thread never syncs", WRITER, "sync=bool(waited)", "sync=False"),
    Bug("a rollback is not on the disk", AGENT_SERVICE, "replace(old, left={**old.left, before.key: self.pending.now()})\n        try:\n            await self.pending.sync(self.pending.note(agent))\n", "replace(old, left={**old.left, before.key: self.pending.now()})\n        try:\n            pass\n"),
    Bug("a rollback is undone by a restart", AGENT_REGISTRY, "[turn for turn in agent.own if turn.key > lsn]", "list(agent.own)"),
    Bug("after a restart an agent stands where it was noted last", AGENT_REGISTRY, "head = later[-1] if later else self._turns.get(record.head)", "head = self._turns.get(record.head)"),
    Bug("a rollback that the disk refuses moves the head", AGENT_SERVICE, "            agent.head = before\n", ""),
    Bug("numbers of abandoned turns are given out again", TURN_TREE, "max((turn.number for turn in self.turns()), default=0)", "self.head.number"),
    Bug("what a rollback left is collected at once", AGENT_REGISTRY, " or turn.key in left)]", ")]"),
    Bug("a branch is collected although a fork has it", AGENT_REGISTRY, "self._drop(gone, agent) if gone else []", "sorted(gone)"),
    Bug("a fork begins where its origin stands", AGENT_SERVICE, "            head=at.key,\n", "            head=agent.head.key,\n"),
    Bug("a fork's history goes with its origin", AGENT_REGISTRY, "                keys -= needed\n", "                pass\n"),
    Bug("turns of a deleted agent stay in the log", AGENT_REGISTRY, "[agent.key, *self._drop(agent.keeps() | lost, agent)]", "[agent.key]"),
    Bug("what was sampled in an agent's name outlives it", AGENT_SERVICE, "*self._replays.take(agent.key), ", ""),
    Bug("a turn that the disk refused is listed", AGENT_SERVICE, "            self.registry.take_back(agent, turn)\n", ""),
    Bug("chunks that another agent has go with a deleted one", AGENT_KV, "return [length * CHUNK_TOKENS for length in longest]", "return [0] * len(longest)"),
    Bug("chunks of requests in another agent's name go with a deleted one", AGENT_KV, "for other in tied if other[:DIGEST_BYTES] == one[:DIGEST_BYTES])", "for other in tied[:0])"),
    Bug("chunks of the default tenant go with an agent of none", AGENT_REGISTRY, "self._salts.get(agent.tenant, NOBODY)", "self._salts.get(agent.tenant, b\"\")"),
    Bug("chunks of a deleted agent stay", AGENT_KV, "keep=keep, disk=True)", "keep=keep, disk=False)"),
    Bug("chunks of a deleted agent's abandoned branches stay", AGENT_KV, "[*agent.turns(), *agent.head.path()]", "[*agent.head.path()]"),
    # ---------------------------------------------------------------------------------------------------- sampling
    Bug("the draw forgets the choice", VOCABULARY, "for word in (seed, choice, position):", "for word in (seed, 0 * choice, position):"),
    Bug("top-k keeps one token more", VOCABULARY, "kept = _ranked(scaled, params.top_k)", "kept = _ranked(scaled, min(params.top_k + 1, vocab))"),
    Bug("top-p keeps no token that crosses it", VOCABULARY, "kept = kept[: int(np.searchsorted(running, goal, side=\"left\")) + 1]", "kept = kept[: max(1, int(np.searchsorted(running, goal, side=\"left\")))]"),
    Bug("top-p is of the whole mass after top-k", VOCABULARY, "(int(running[-1]) if mass is None else mass)", "int(weigh(scaled).sum())"),
    Bug("min-p is asked of the logits", VOCABULARY, "return kept[scaled[kept] >= least]", "return kept[scaled[kept] >= params.min_p - 1]"),
    Bug("equal logits are ranked by the highest id", VOCABULARY, "return np.sort((bits << 32) | ids) & 0xFFFFFFFF", "return 0xFFFFFFFF - (np.sort((bits << 32) | (0xFFFFFFFF - ids)) & 0xFFFFFFFF)"),
    Bug("a penalty makes negative logits likelier", VOCABULARY, "np.where(values > 0, values / penalty, values * penalty)", "values / penalty"),
    Bug("presence counts the prompt", VOCABULARY, "counts = Counter(row.tokens[row.prompt_len :])", "counts = Counter(row.tokens)"),
    Bug("frequency counts a token once", VOCABULARY, "np.float32(params.frequency_penalty) * times +", "np.float32(params.frequency_penalty) +"),
    Bug("stop tokens are banned one token too long", VOCABULARY, "len(row.tokens) - row.prompt_len < params.min_tokens", "len(row.tokens) - row.prompt_len <= params.min_tokens"),
    Bug("a draw is not divided by the temperature", VOCABULARY, "        scaled /= np.array([divisor(rows[i].sampling) for i in part])[:, None]\n", ""),
    Bug("the first run of a draw is passed over", VOCABULARY, "before = int(sums[run - 1]) if run else 0", "before = int(sums[run - 1])"),
    Bug("exponentials lose their power of two", VOCABULARY, "    bits += turned.view(np.int32) << 23\n", ""),
)  # fmt: skip

LAWS = (
    dict.fromkeys((STOPS, TEXT, BYTES, FLIGHT, WORKER), STREAMS)
    | dict.fromkeys((DISK, STATE, DISK_WRITER, DISK_INDEX, FOLDER, CHUNKS, PINS, DISK_MAINTENANCE), STORAGE)
    | dict.fromkeys((LOG, SEGMENT, INDEX, LOG_FOLDER, RECOVERY, COMPACTION, RECORDS), TOKEN_LOG)
    | dict.fromkeys((AGENT_SERVICE, AGENT_REGISTRY, TURN_TREE, RUNNING, WRITER, AGENT_KV), AGENTS)
    | {CHECK: CODECS, VOCABULARY: SAMPLING}
)
"""Which simulator has to find the bugs of a file; where none is named, the scheduler's."""


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from its source with a bug in it; never from cached bytecode."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug
        self._source = bug.source().encode()

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._bug.module else None

    def get_filename(self, name: str) -> str:
        return f"{self._bug.file} with a bug: {self._bug.name}"

    def get_data(self, path: str) -> bytes:
        return self._source


def hunt(bug: Bug) -> tuple[int, str] | None:
    """In a process of its own: the first seed that finds the bug, and what it says; None if none does."""
    finder = _Planted(bug)
    for name in [name for name in sys.modules if name.split(".")[0] in ("cairn", "tests")]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    logging.disable(logging.CRITICAL)
    laws = LAWS.get(bug.file, SCHEDULERS)
    simulator = importlib.import_module(laws)
    spec = sys.modules[bug.module].__spec__
    if spec is None or spec.loader is not finder:
        raise RuntimeError(f"{bug.name}: the planted module was not imported")

    first = FIRST.get(bug.name, 0)
    assert first < SCHEDULES[laws]
    for seed in dict.fromkeys((first, *range(SCHEDULES[laws]))):
        if (found := broken(simulator.run, seed)) is not None:
            return seed, found
    return None


def broken(run: Callable[[int], object], seed: int) -> str | None:
    """What breaks in one schedule; None if nothing does."""

    def stuck(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the schedule hangs")

    signal.signal(signal.SIGALRM, stuck)
    signal.setitimer(signal.ITIMER_REAL, STUCK_SECONDS, 5)  # again and again: somebody may catch the first
    try:
        run(seed)
    except Exception as error:
        return str(error) or type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def apart(what: str, work: Callable[[], tuple[int, str] | None]) -> tuple[int, str] | None:
    """What `work` gives in a forked child, so that no bug outlives its turn."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            found = work()
            os.write(writer, f"{found[0]} {found[1]}".encode()[:4000] if found else b"none")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"{what}: the hunt itself failed")
    if answer == "none":
        return None
    seed, _, text = answer.partition(" ")
    return int(seed), text


@functools.cache
def control(laws: str, seed: int) -> str | None:
    """What breaks in a schedule that has no bug in it, in a child of this process, which never had one."""

    def work() -> tuple[int, str] | None:
        logging.disable(logging.CRITICAL)
        found = broken(importlib.import_module(laws).run, seed)
        return None if found is None else (seed, found)

    found = apart(f"{laws} without a bug", work)
    return None if found is None else found[1]


def judge(bug: Bug) -> tuple[tuple[int, str] | None, str | None]:
    """What `hunt` gives, and what breaks in that schedule without the bug: then the schedule has found nothing."""
    bug.source()
    found = apart(bug.name, functools.partial(hunt, bug))
    return found, None if found is None else control(LAWS.get(bug.file, SCHEDULERS), found[0])


def main(names: Sequence[str]) -> int:
    """Print bug -> seed and the score; 1 if fewer than 95 % were found, or if a schedule breaks without a bug."""
    bugs = [bug for bug in BUGS if not names or bug.name in names]
    for name in SIMULATORS:
        importlib.import_module(name)
    started, caught, sound = time.monotonic(), 0, True
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # each waits for a process of its own
        for bug, (found, without) in zip(bugs, threads.map(judge, bugs), strict=True):
            caught += found is not None and without is None
            where = "NOT FOUND" if found is None else f"{found[0]:5}"
            what = "" if found is None else found[1].split(": ", 1)[-1][:100]
            if without is not None:
                sound, what = False, f"NOT COUNTED, for without the bug: {without[:200]}"
            print(f"{where:>9}  {bug.name:60} {what}", flush=True)
    print(f"planted bugs found: {caught} of {len(bugs)} in {time.monotonic() - started:.0f} s")
    return 0 if sound and caught * 40 >= len(bugs) * 38 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
