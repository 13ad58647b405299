"""Deliberate bugs, each applied alone, that the simulators must find: a mutation score for the laws.

A bug replaces one piece of code by another. It is addressed by structure: a file, a function in it, and an expression
or consecutive statements that occur exactly once in that function, whatever the formatting. So a bug cannot silently do
nothing. A hunt runs in a forked process whose function has the bug's code, until a law breaks or the simulator's number
of schedules (`SCHEDULES`) has passed. A bug counts as found if the same schedule passes without it.

`make prove` hunts all bugs from the first schedule on. `make test` has no time for that: it first tries the schedule
that found the bug in the last full hunt (`bug_seeds.json`), and goes on in order only if that finds nothing. A bug that
no schedule found then counts as not found. Every `SHARE`th bug that was found `SOON` is hunted from the first schedule
on all the same, so that the score does not rest on the record alone.

`make test` also hunts only half of each simulator's bugs (`--half`): those with the lower checksums of their names and
files. The same source always draws the same bugs, and a changed file draws anew. Without the option all are hunted.

    python -m tests.laws.planted_bugs [--prove] [--half] [--record] [name ...]
"""

# ruff: noqa: E501  a piece of code stands in one line
from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType

SOURCE = Path(__file__).parents[2] / "src" / "cairn"
RECORD = Path(__file__).with_name("bug_seeds.json")
SCHEDULERS, STREAMS, STORAGE, CODECS, SAMPLING, TOKEN_LOG, AGENTS, AGENT_DAY = SIMULATORS = (
    "tests.laws.simulator",
    "tests.laws.streams",
    "tests.laws.storage",
    "tests.laws.codecs",
    "tests.laws.sampling",
    "tests.laws.token_log",
    "tests.laws.agents",
    "tests.laws.agent_day",
)
SCHEDULES = {
    SCHEDULERS: 2000,
    STREAMS: 2000,
    STORAGE: 200,
    CODECS: 20,
    SAMPLING: 2000,
    TOKEN_LOG: 100,
    AGENTS: 25,
    AGENT_DAY: 3,
}
SHARE, SOON = 16, 30
STUCK_SECONDS = 30
"""A schedule that takes longer hangs, which counts as found."""


@dataclass(frozen=True)
class Bug:
    """A bug: its name, the file and function, and the code before and after.

    `where` is a qualified name: of a function, of a class for its fields, or empty for the module's own statements.
    """

    name: str
    file: str
    where: str
    old: str
    new: str

    def tree(self) -> ast.Module:
        """Return the file's syntax tree with the bug in it."""
        tree = ast.parse((SOURCE / self.file).read_text())
        scope: ast.AST = tree
        for name in self.where.split(".") if self.where else ():
            inner = (one for one in ast.walk(scope) if one is not scope and getattr(one, "name", None) == name)
            if (scope := next(inner, tree)) is tree:  # type: ignore[assignment]
                raise ValueError(f"{self.name}: {self.file} has no {self.where}")
        old, new = _parsed(self.old, self.new)
        places = list(_places(scope, old))
        if len(places) != 1 or list(map(_shape, old)) == list(map(_shape, new)):
            raise ValueError(f"{self.name}: {self.where} must hold exactly once: {self.old}")
        node, field, at = places[0]
        if at is None:
            setattr(node, field, new[0])
        else:
            getattr(node, field)[at : at + len(old)] = new
        return ast.fix_missing_locations(tree)

    @property
    def module(self) -> str:
        return "cairn." + self.file.removesuffix(".py").replace("/", ".")

    @property
    def label(self) -> str:
        """The file's name in tracebacks."""
        return f"{self.file} with a bug: {self.name}"


def _parsed(*codes: str) -> list[list[ast.AST]]:
    """Parse the codes: as expressions if all of them are, else as lists of statements."""
    parsed = [ast.parse(code).body for code in codes]
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in parsed):
        return [[body[0].value] for body in parsed if isinstance(body[0], ast.Expr)]
    return [list[ast.AST](body) for body in parsed]


def _shape(node: ast.AST) -> str:
    """Return a node's structure, without its position and without the difference between load, store and delete."""
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


def _places(scope: ast.AST, wanted: Sequence[ast.AST]) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Find each place in `scope` with this code: a node, the name of its field, and the index if that is a list."""
    shapes, first, count = list(map(_shape, wanted)), type(wanted[0]), len(wanted)
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                for at in range(len(value) - count + 1):
                    if type(value[at]) is first and list(map(_shape, value[at : at + count])) == shapes:
                        yield node, field, at
            elif type(value) is first and _shape(value) == shapes[0]:
                yield node, field, None


BLOCKS = "kv/pool/blocks.py"
PREFIX = "kv/pool/prefix.py"
CACHE = "kv/pool/cache.py"
ATTENTION_WINDOW = "kv/pool/cache.py"
PARTIAL_BLOCKS = "kv/pool/partial_blocks.py"
SEQUENCE_KV = "kv/pool/sequence_kv.py"
WAITERS = "kv/pool/waiters.py"
TIERS = "kv/tiers/tiers.py"
WRITE_BEHIND = "kv/tiers/write_behind.py"
WAITING_CHUNKS = "kv/tiers/waiting_chunks.py"
FLUSHES = "kv/tiers/flushes.py"
STORE_WRITER = "kv/tiers/write_behind.py"
STORE_READER = "kv/tiers/reader.py"
RAM = "kv/ram.py"
STANDING = "kv/tiers/store.py"
SCHEDULER = "scheduler/scheduler.py"
SPECULATION = "scheduler/speculation.py"
MTP_HEAD = "scheduler/drafts/mtp_head.py"
SPARE_STATES = "kv/pool/spare_states.py"
SAMPLING_ROWS = "engine/row_results.py"
STEP_BUDGET = "scheduler/step_budget.py"
PLANNED_STEP = "scheduler/planned_step.py"
SEQUENCE = "scheduler/sequence.py"
WAITING = "scheduler/queue.py"
ROUNDS = "scheduler/fairness.py"
FAKE = "engine/fake.py"
STOPS = "text/output/stream.py"
TEXT = "text/output/stream.py"
BYTES = "text/tokens/detokenizer.py"
FLIGHT = "frontend/request_state.py"
WORKER = "worker/worker.py"
CHECK = "kv/disk/codec_comparison.py"
VOCABULARY = "kernels/sampling.py"
DISK = "kv/disk/store.py"
STATE = "kv/disk/budget.py"
DISK_WRITER = "kv/disk/disk_writer.py"
DISK_INDEX = "kv/disk/index.py"
FOLDER = "kv/disk/folder.py"
CHUNKS = "kv/disk/chunk_file.py"
PINS = "kv/disk/pins.py"
DISK_MAINTENANCE = "kv/disk/maintenance.py"
REBUILD_INDEX = "kv/disk/rebuild_index.py"
LOG = "agents/log/token_log.py"
SEGMENT = "agents/log/segment.py"
INDEX = "agents/log/index.py"
RECOVERY = "agents/log/recovery.py"
RECORDS = "agents/log/records.py"
AGENT_SERVICE = "agents/agent_service.py"
AGENT_REGISTRY = "agents/agent_registry.py"
TURN_TREE = "agents/turn_tree.py"
RUNNING = "agents/running_turn.py"
WRITER = "agents/log/writer_thread.py"
AGENT_KV = "agents/kv.py"

BUGS = (
    # ------------------------------------------------------------------------------------------------ block pool
    Bug("taken blocks are not held", BLOCKS, "BlockPool.take", "self._holders[block] = 1", "self._holders[block] = 0"),
    Bug("a shared block is freed by its first user", BLOCKS, "BlockPool.release", "self._holders[block] == 0", "True"),
    Bug("a held block stays evictable", BLOCKS, "BlockPool.hold", "del self._cached[block]", "pass"),
    Bug("a cached block is also free", BLOCKS, "BlockPool.release", "self._published[block] is None", "True"),
    Bug("the newest block is evicted first", BLOCKS, "BlockPool._evict", "iter(self._cached)", "reversed(self._cached)"),
    Bug("an evicted block is still found", BLOCKS, "BlockPool._unpublish", "del self._index[published.key]", "pass"),
    Bug("an evicted block keeps its key", BLOCKS, "BlockPool._unpublish", "self._published[block] = None", "pass"),
    Bug("the second publisher replaces the first", BLOCKS, "BlockPool.publish", "key not in self._index", "True"),
    Bug("an adopted block is not held", BLOCKS, "BlockPool.publish", "self.hold(twin)", "pass"),
    Bug("a block whose twin is adopted leaks", BLOCKS, "BlockPool.publish", "self.release((block,))", "pass"),
    Bug("one more block is promised than there is", BLOCKS, "BlockPool.available", "len(self._free) + len(self._cached)", "len(self._free) + len(self._cached) + 1"),
    # ---------------------------------------------------------------------------------------------- keys and hits
    Bug("a key forgets what came before its block", PREFIX, "extend", "parent + struct.pack(f'<{len(tokens)}I', *tokens)", "struct.pack(f'<{len(tokens)}I', *tokens)"),
    Bug("tenants share keys", PREFIX, "root", "(_DOMAIN, identity, salt, group.kind.encode(), struct.pack(f'<{len(numbers)}q', *numbers))", "(_DOMAIN, identity, group.kind.encode(), struct.pack(f'<{len(numbers)}q', *numbers))"),
    Bug("a whole-prompt hit leaves nothing to compute", CACHE, "Cache._hit", "len(tokens) - 1", "len(tokens)"),
    Bug("the last block of a whole-prompt hit is not copied", PLANNED_STEP, "Plan._copy", "engine.copy_blocks(group, [(source, target)]).wait()", "pass"),
    Bug("a part of a block is copied for the first group only", PARTIAL_BLOCKS, "PartialBlocks.copy", "self._copies.append(Copy(number, part.blocks[number], table[hit]))", "self._copies += [Copy(number, part.blocks[number], table[hit])][:1 - number]"),
    Bug("a block is reused beyond the tokens in which it agrees", BLOCKS, "BlockPool.nearest", "found, most = (block, count)", "found, most = (block, len(tokens))"),
    Bug("a block is reused although its first tokens are others", BLOCKS, "BlockPool.nearest", "common_length(own, tokens)", "common_length(own[1:], tokens[1:]) + 1"),
    Bug("the nearest block is not the one that agrees most", BLOCKS, "BlockPool.nearest", "after[max(0, at - 1):at + 1]", "after[at:at + 1]"),
    Bug("all groups reuse as much of a block as the first", PARTIAL_BLOCKS, "PartialBlocks.find", "rest = rest[:count]", "rest = rest if number else rest[:count]"),
    Bug("a part has a token that was not computed", PARTIAL_BLOCKS, "PartialBlocks.publish", "tuple(tokens[computed - more:computed])", "tuple(tokens[computed - more:computed + 1])"),
    Bug("what a failed row left of a block is kept", SCHEDULER, "Scheduler._fail", "sequence.computed -= sequence.computed % self._block_tokens", "sequence.computed = min(len(sequence.tokens), sequence.computed + 1)"),
    Bug("a part outlives the block that begins with it", BLOCKS, "BlockPool._insert", "self.forget(part)", "pass"),
    Bug("a block of which a part was copied stays held", PARTIAL_BLOCKS, "PartialBlocks.copy", "pool.release((part.blocks[number],))", "pass"),
    Bug("an evicted block is still found by its first tokens", BLOCKS, "BlockPool._unpublish", "published.parent", "False"),
    Bug("states are reused in parts", PARTIAL_BLOCKS, "PartialBlocks.__init__", "any((group.kind == 'state' for group in info.groups))", "False"),
    Bug("a part is copied from a block that the sequence takes", PARTIAL_BLOCKS, "PartialBlocks.find", "pool.hold(block)", "pass"),
    Bug("the last block of a whole-prompt hit is copied a plan too late", SCHEDULER, "Scheduler.plan", "copies = self._cache.copies()", "copies, self._late = (getattr(self, '_late', []), self._cache.copies())"),
    Bug("a hit ignores missing window blocks", CACHE, "Cache._hit", "gap is None", "True"),
    Bug("a window hit skips too far", CACHE, "Cache._hit", "hit = gap", "return gap"),
    Bug("a window is one position too short", ATTENTION_WINDOW, "first_read", "position - group.window + 1", "position - group.window + 2"),
    Bug("a window is one block too short", ATTENTION_WINDOW, "first_read", "max(0, position - group.window + 1) // block_tokens", "-(-max(0, position - group.window + 1) // block_tokens)"),
    # ----------------------------------------------------------------------------------------- open, grow, publish
    Bug("a passed block stays in the table", CACHE, "Cache._give_back_passed", "table[index] = NO_BLOCK", "break"),
    Bug("a passed block is never given back", CACHE, "Cache._give_back_passed", "first_read(group, computed, self._block_tokens) - 1", "-1"),
    Bug("a partly filled block is published", CACHE, "Cache.publish", "computed // self._block_tokens", "min(len(tokens), computed + 1) // self._block_tokens"),
    Bug("the room of the second pool is not checked", CACHE, "Cache.grow", "(blocks - len(table) > pool.available for pool, table in pairs)", "(blocks - len(table) > pool.available for pool, table in pairs[:1])"),
    Bug("blocks are given back first to last", CACHE, "Cache.close", "reversed(table)", "table"),
    Bug("an open that finds no room keeps what it held", CACHE, "Cache._hold_with_room", "self.close(seq_kv, tokens)", "pass"),
    Bug("room is counted before the hit is held", CACHE, "Cache._hold_with_room", "self._hold_prefix(seq_kv, tokens, hit)", "pass"),
    Bug("the table keeps the block that was released for its twin", CACHE, "Cache.publish", "table[done] = block", "pass"),
    Bug("a hit is published again", CACHE, "Cache._hold_found", "seq_kv.table.published[number] = len(table)", "pass"),
    Bug("capacity is that of the longest table", SEQUENCE_KV, "BlockTable.measure", "min((len(blocks) for blocks in self.groups))", "max((len(blocks) for blocks in self.groups))"),
    Bug("a closed context still claims to compute", CACHE, "Cache.close", "self._unclaim(seq_kv, tokens, seq_kv.claim.blocks.stop)", "pass"),
    Bug("published blocks are still claimed", CACHE, "Cache.publish", "self._unclaim(seq_kv, tokens, seq_kv.table.published[0])", "pass"),
    Bug("equal prompts do not wait for each other", CACHE, "Cache._on_its_way", "owner is None", "True"),
    Bug("a window needs one block less than it does", ATTENTION_WINDOW, "window_blocks", "-(-(group.window - 1) // block_tokens) + 1", "-(-(group.window - 1) // block_tokens)"),
    Bug("a window hit counts its held blocks twice", CACHE, "Cache._hold_with_room", "span - held", "span"),
    # ------------------------------------------------------------------------------------------------------ states
    Bug("a hit is taken without a state", CACHE, "Cache._gap", "(found := next(ends, 0)) < hit", "(found := next(ends, 0)) < 0"),
    Bug("a snapshot is published before its step", CACHE, "Cache._publish_states", "range(seq_kv.table.published[number], full)", "range(seq_kv.table.published[number], len(table))"),
    Bug("a state is given back before the row that reads it", CACHE, "Cache.publish", "first_read(group, computed, self._block_tokens)", "full"),
    Bug("a state that no position reads is held", CACHE, "Cache._give_back_states", "max(0, done - 1)", "done"),
    Bug("a state is read one position too late", ATTENTION_WINDOW, "first_read", "max(0, position - 1) // block_tokens", "position // block_tokens"),
    Bug("the row's last state is left nowhere", CACHE, "Cache._grow_with_states", "sorted({*seq_kv.table.snapshots.places(len(table), blocks), blocks - 1})", "seq_kv.table.snapshots.places(len(table), blocks)"),
    Bug("the pages of a state are another one's", TIERS, "Tiers._bring", "block != NO_BLOCK", "block != NO_BLOCK or chunk.group > 0"),
    # -------------------------------------------------------------------------------------------------- scheduler
    Bug("a preempted sequence believes in its old progress", SCHEDULER, "Scheduler._fit", "victim.computed = victim.again = 0", "victim.again = 0"),
    Bug("a preempted sequence keeps its blocks", SCHEDULER, "Scheduler._fit", "self._cache.close(victim.kv, victim.tokens, victim.computed)", "pass"),
    Bug("the oldest sequence is preempted", SCHEDULER, "Scheduler._fit", "max(self._running, key=Sequence.by_turn)", "min(self._running, key=Sequence.by_turn)"),
    Bug("a victim of this plan grows again", SCHEDULER, "Scheduler._chunk", "if sequence.state is not State.RUNNING:\n    return", "pass"),
    Bug("a victim of this plan keeps its row", SCHEDULER, "Scheduler.plan", "self._preemptions != preemptions", "False"),
    Bug("decode rows are not counted in the budget", SCHEDULER, "Scheduler._add_prompts", "self._step_tokens - len(work)", "self._step_tokens"),
    Bug("a step's budget ignores time", SCHEDULER, "Scheduler._add_prompts", "self._pace.tokens(len(work), extra)", "math.inf"),
    Bug("a slow machine reads no prompt", STEP_BUDGET, "PrefillPace.tokens", "self._least", "0"),
    Bug("time is short where nobody waits", STEP_BUDGET, "PrefillPace.tokens", "not rows or not self._each", "not self._each"),
    Bug("on a slow machine a long prompt takes all the time", STEP_BUDGET, "StepBudget._keep_half", "self._most - self._most // 2", "self._most"),
    Bug("what a long prompt leaves on a slow machine is nobody's", STEP_BUDGET, "StepBudget.use_rest", "min(self._most - self.taken, most - self._long)", "0"),
    Bug("one row too many", SCHEDULER, "Scheduler._admit", "len(self._running) + skipped.any >= self._max_rows", "len(self._running) > self._max_rows"),
    Bug("nobody joins while others run", SCHEDULER, "Scheduler._admit", "budget.left < 1 or len(self._running) + skipped.any >= self._max_rows", "self._running or budget.left < 1 or len(self._running) + skipped.any >= self._max_rows"),
    Bug("a small request overtakes one that does not fit", SCHEDULER, "Scheduler._open", "sequence.spare = spare\nreturn Admission.STOPS", "sequence.spare = spare\nreturn Admission.PASSES"),
    Bug("a long prompt leaves short ones no room", STEP_BUDGET, "StepBudget.offer", "self._keep_half()", "pass"),
    Bug("a long prompt gets nothing beside short ones", STEP_BUDGET, "StepBudget._keep_half", "self._most - self._most // 2", "0"),
    Bug("deadlines are not looked at", SCHEDULER, "Scheduler.plan", "now >= self._next_deadline", "False"),
    Bug("a deadline is reported as success", SCHEDULER, "Scheduler._expire", "FinishReason.DEADLINE", "FinishReason.LENGTH"),
    Bug("the next deadline is forgotten", SCHEDULER, "Scheduler._expire", "min((s.deadline for s in self._sequences.values()), default=math.inf)", "math.inf"),
    Bug("a dropped request gets its result", SCHEDULER, "Scheduler.commit", "if sequence.state is not RUNNING:\n    continue", "pass"),
    Bug("requests survive an engine that raised", SCHEDULER, "Scheduler.commit", "results = [RowResult(error=error)] * len(plan.rows)", "return outputs"),
    Bug("what a failed row computed is published", SCHEDULER, "Scheduler._advance", "return self._fail(sequence, now, FinishReason.ERROR, result.error)", "self._cache.publish(sequence.kv, sequence.tokens, row.end)\nreturn self._fail(sequence, now, FinishReason.ERROR, result.error)"),
    Bug("a finished request is kept", SCHEDULER, "Scheduler._end", "del self._sequences[sequence.request.id]", "pass"),
    Bug("blocks are published before the step has run", SCHEDULER, "Scheduler.plan", "rows = [sequence.row(end) for sequence, end in work.items()] if not drafts else self._rows(work, drafts)", "rows = [sequence.row(end) for sequence, end in work.items()]\nfor sequence, end in work.items():\n    self._cache.publish(sequence.kv, sequence.tokens, end)"),
    Bug("scored prompts use cached tokens", SCHEDULER, "Scheduler._open", "sequence.scored >= sequence.to_score", "True"),
    Bug("prompt logprobs are sent again after preemption", SCHEDULER, "Scheduler._advance", "sequence.scored += len(result.prompt_logprobs)", "pass"),
    Bug("a cache report with every token", SCHEDULER, "Scheduler._advance", "sequence.first_token is None", "True"),
    Bug("the covered prefix is computed again", SCHEDULER, "Scheduler._open", "sequence.computed = covered", "sequence.computed = 0"),
    Bug("a sampled token is lost", SEQUENCE, "Sequence.take", "(token,)", "(token,)[:len(self.tokens) % 7 * 99]"),
    Bug("a forced token is not told", SEQUENCE, "Sequence.news", "tuple(self.tokens[self.reported:])", "tuple(self.tokens[-1:])"),
    Bug("a token is told again", SEQUENCE, "Sequence.news", "self.reported = len(self.tokens)", "self.reported = max(self.reported, len(self.tokens) - 1)"),
    Bug("forced tokens have no end", SEQUENCE, "Sequence.force", "finish = self.ending()", "pass"),
    Bug("a grammar does not hear of its forced tokens", SEQUENCE, "Sequence._append", "self.matcher is not None", "self.matcher is not None and len(self.tokens) % 5"),
    Bug("an answer without any choice is not told", SCHEDULER, "Scheduler._admit", "sequence.news()", "()"),
    Bug("mirostat learns nothing of a token that was drawn", SEQUENCE, "Sequence.take", "self.mu = mu", "pass"),
    Bug("mirostat learns nothing of a token that was forced", SEQUENCE, "Sequence.force", "self.mu is not None", "False"),
    Bug("mirostat begins anew", SEQUENCE, "start_mu", "request.mu is None", "True"),
    Bug("a continuation's tokens are told again", SEQUENCE, "Sequence.__init__", "self.reported = len(self.tokens)", "self.reported = self.prompt_len"),
    Bug("progress stops at the end of a chunk", SCHEDULER, "Scheduler._advance", "end = sequence.computed = row.end", "end = row.end\nsequence.computed = min(end, row.start + 8)"),
    Bug("a stop token is passed over", SEQUENCE, "Sequence.ending", "return FinishReason.STOP", "pass"),
    Bug("stop tokens count before min_tokens", SEQUENCE, "Sequence.ending", "count > self.prompt_len + sampling.min_tokens", "sampling.min_tokens < 3"),
    Bug("one token more than max_tokens", SEQUENCE, "Sequence.__init__", "self.prompt_len + request.sampling.max_tokens", "self.prompt_len + request.sampling.max_tokens + 1"),
    Bug("one token more than the context", SEQUENCE, "Sequence.__init__", "min(limit, self.prompt_len + request.sampling.max_tokens)", "min(limit + 1, self.prompt_len + request.sampling.max_tokens)"),
    Bug("the choice is not passed on", SEQUENCE, "Sequence.row", "request.choice", "0"),
    Bug("a continuation starts over", SEQUENCE, "Sequence.__init__", "[*request.prompt, *request.generated]", "[*request.prompt]"),
    Bug("a continuation's tokens count as prompt", SEQUENCE, "Sequence.__init__", "len(request.prompt)", "len(self.tokens)"),
    Bug("priorities are ignored", SEQUENCE, "Sequence.__init__", "now - request.priority * AGE_SECONDS", "now"),
    Bug("logits are wanted in the middle of a prompt", SEQUENCE, "Sequence.row", "end - 1 if end == len(self.tokens) else None", "end - 1"),
    Bug("the queue is last in, first out", ROUNDS, "RoundRobin.add", "insort(line, item, key=key)", "line.insert(0, item)"),
    Bug("whose turn it is, is not kept", ROUNDS, "RoundRobin.served", "self._lines[tenant] = line", "self._lines = {tenant: line, **self._lines}"),
    Bug("a tenant that was served stays in front", WAITING, "WaitingQueue.start", "self._rounds.served(sequence.request.share)", "pass"),
    Bug("tenants take no turns", ROUNDS, "RoundRobin._in_turns", "(item for around in zip_longest(*lines) for item in around if item is not None)", "iter(sorted((item for line in lines for item in line), key=lambda one: one.rank))"),
    Bug("a tenant's weight gives it nothing", ROUNDS, "RoundRobin.served", "had < self._turns_of(tenant)", "False"),
    Bug("a tenant of less weight takes nothing from it", ROUNDS, "RoundRobin._turns_of", "self._turns.get(tenant, self._turns[''])", "self._turns.get(tenant, 1)"),
    Bug("requests of tenants with weights begin as they came", ROUNDS, "RoundRobin._weighted", "iter(ordered)", "iter(sorted(ordered, key=lambda one: one.rank))"),
    Bug("classes of tenants are nothing", ROUNDS, "Classes.__bool__", "bool(self._of)", "False"),
    Bug("a class is never late enough", ROUNDS, "Classes.levels", "max(self._first, priority - int(waited / AGE_SECONDS))", "priority"),
    Bug("a tenant that has more in line goes first", ROUNDS, "RoundRobin._in_turns", "[tuple(line) for line in waiting.values()]", "sorted(map(tuple, waiting.values()), key=len, reverse=True)"),
    Bug("a tenant's second waits behind all of another's", ROUNDS, "RoundRobin._in_turns", "(item for around in zip_longest(*lines) for item in around if item is not None)", "(item for line in lines for item in line)"),
    Bug("one that was preempted stands behind those that never ran", WAITING, "WaitingQueue.__iter__", "chain(tuple(self._back), rounds)", "chain(rounds, tuple(self._back))"),
    Bug("what was long once is long for ever", SCHEDULER, "Scheduler._open", "sequence.long_beside = kept", "sequence.long_beside = 1 << 30"),
    Bug("a long look is not forgotten at the next", SCHEDULER, "Scheduler._open", "sequence.long_beside = 0", "pass"),
    # ------------------------------------------------------------------------------------------------ speculation
    Bug("a draft is published", SCHEDULER, "Scheduler._advance_draft", "self._cache.publish(sequence.kv, sequence.tokens, sequence.computed)", "self._cache.publish(sequence.kv, row.tokens, row.end)"),
    Bug("all guesses count as computed", CACHE, "Cache.settle_guesses", "return right", "return end"),
    Bug("a guess is kept after a wrong one", SPECULATION, "sampled", "found[-1][0] != guesses[place - 1]", "False"),
    Bug("a draw goes by the length of its row", SAMPLING_ROWS, "_lines", "Line(row, top, mask, place + 1)", "Line(row, top, mask, row.end)"),
    Bug("log-probabilities are those of a draft's first place", SPECULATION, "sampled", "found.append((one.token, one.logprob))", "found.append((one.token, result.logprob))"),
    Bug("the masks of guesses are that of the first place", SAMPLING_ROWS, "_masks", "(row.mask, *(row.masks or (None,) * row.draft))", "(row.mask,) * (row.draft + 1)"),
    Bug("a draft goes on behind what the grammar allows", SPECULATION, "Speculation._guesses", "guesses[:sequence.matcher.accepts(guesses)]", "guesses"),
    Bug("a draft is longer than the answer may be", SPECULATION, "Speculation.guess", "sequence.longest - length - 1", "sequence.longest"),
    Bug("the blocks of wrong guesses are kept", SCHEDULER, "Scheduler._advance_draft", "self._cache.shrink(sequence.kv, len(sequence.tokens))", "pass"),
    Bug("guesses are no tokens of the step", SCHEDULER, "Scheduler._add_prompts", "self._step_tokens - len(work) - extra", "self._step_tokens - len(work)"),
    Bug("a row with guesses counts as a prompt", PLANNED_STEP, "sizes", "row.end - row.start - row.draft - one.again", "row.end - row.start"),
    Bug("a sequence with mirostat has guesses", SEQUENCE, "Sequence.__init__", "request.want == 'token' and self.mu is None", "request.want == 'token'"),
    Bug("a drafter hears of tokens twice", SPECULATION, "Speculation.guess", "sequence.known = length", "pass"),
    Bug("a drafter outlives its request", SCHEDULER, "Scheduler._end", "self._speculation.policy.close(sequence.drafter)", "pass"),
    Bug("states of wrong guesses are the head's", SCHEDULER, "Scheduler._advance_draft", "self._speculation.take_states(sequence, row, result.states, right)", "self._speculation.take_states(sequence, row, result.states, row.end)"),
    Bug("states that are known come twice", MTP_HEAD, "MtpGuesses.take_states", "states = states[(self._next - first) * width:]", "pass"),
    Bug("the guesses of the head stay in its context", MTP_HEAD, "MtpHead._read", "del run[known:]", "pass"),
    Bug("the head goes on behind its own guesses", MTP_HEAD, "MtpHead._read", "states = guesses.take(known - start)", "states = guesses.take(known - start)\nguesses.read += width - 1"),
    Bug("the head keeps the blocks of what has ended", MTP_HEAD, "MtpGuesses.forget", "self._head.give_back(self.blocks)", "self.blocks.clear()"),
    Bug("a state goes on behind a wrong guess", CACHE, "Cache.settle_guesses", "self._states and right < end", "False"),
    Bug("the state before a draft is not copied", PLANNED_STEP, "Plan._copy", "self.copies", "[one for one in self.copies if engine.info.groups[one[0]].kind != 'state']"),
    Bug("the copy of a state stays held", SPARE_STATES, "SpareStates.drop", "pool.release((spare,))", "pass"),
    Bug("the state that wrong guesses left stays held", SPARE_STATES, "SpareStates.restore", "pool.release((table[index],))", "pass"),
    Bug("a block between the ends of a row is missing at its new end", CACHE, "Cache.shrink", "table[-1] == NO_BLOCK", "False"),
    # -------------------------------------------------------------------------------------------- steps planned ahead
    Bug("a pending token is that of another row", SCHEDULER, "Scheduler.follow", "[sequence.row_ahead(number) for sequence, number in going.items()]", "[sequence.row_ahead(number) for number, sequence in enumerate(reversed(going))]"),
    Bug("a pending token is used before it came", FAKE, "FakeEngine._with_tokens", "self._sampled[row.pending] if row.pending < len(self._sampled) else None", "row.tokens[-1]"),
    Bug("a step is planned ahead of a grammar", SCHEDULER, "_goes_on", "sequence.matcher is None and sequence.mu is None and sequence.request.sampling.max_tokens > 0", "sequence.mu is None"),
    Bug("a step is planned ahead of mirostat's state", SCHEDULER, "_goes_on", "sequence.matcher is None and sequence.mu is None and sequence.request.sampling.max_tokens > 0", "sequence.matcher is None"),
    Bug("a step planned ahead has no blocks", SCHEDULER, "Scheduler.follow", "all((self._cache.grow(one.kv, len(one.tokens) + 1) for one in going))", "True"),
    Bug("a step is planned ahead of a prompt", SCHEDULER, "_goes_on", "not row.samples", "False"),
    # ------------------------------------------------------------------------------------------------ who is woken
    Bug("nobody is woken by what is published", CACHE, "Cache.publish", "self._waiters.settled(seq_kv.chains[0].key(index, tokens))", "pass"),
    Bug("nobody is woken by the end of a claim", CACHE, "Cache._unclaim", "self._waiters.settled(key)", "pass"),
    Bug("nobody is woken by the end of its load", CACHE, "Cache.close", "self._waiters.wake(seq_kv)", "pass"),
    Bug("nobody is woken by blocks that are given back", CACHE, "Cache.close", "self._waiters.freed()", "pass"),
    Bug("nobody is woken by blocks that a step gives back", CACHE, "Cache.publish", "self._waiters.freed()", "pass"),
    Bug("only one of those that wait for a block is woken", WAITERS, "Waiters.settled", "tuple(self._watched.get(key, ()))", "tuple(self._watched.get(key, ()))[:1]"),
    Bug("who waits for a load is not counted", WAITERS, "Waiters.remember", "self._blocked[seq_kv] = None", "self._blocked.update({seq_kv: None} if match.blocked_on != 'load' else {})"),
    Bug("who has waited is still counted", WAITERS, "Waiters.wake", "self._blocked.pop(seq_kv, None)", "pass"),
    Bug("what is waited for is forgotten", CACHE, "Cache._remember", "keys = [blocked_on]", "pass"),
    Bug("what would make a long prompt short is not watched", CACHE, "Cache._remember", "keys = [key(hit, tokens), *(one for index, one in later if index < reach or one in self._computing)]", "pass"),
    Bug("who waits, waits for another block than the other brings", CACHE, "Cache._on_its_way", "return key(hit, tokens)", "return key(last - 1, tokens)"),
    Bug("blocks that were taken are there for who found too few", SCHEDULER, "Scheduler._known", "spare >= sequence.spare", "spare > 0"),
    # ------------------------------------------------------------------------------------------------- the engine
    Bug("the digest before is read one slot off", FAKE, "FakeEngine._write", "(row.start - 1) % size", "row.start % size"),
    Bug("attention reads past the window", FAKE, "FakeEngine._states", "if group.window:\n    values[starts] &= self._masks_from[[max(0, position - group.window + 1) % size for _, position in wanted]]", "if False:\n    values[starts] &= self._masks_from[[max(0, position - group.window + 1) % size for _, position in wanted]]"),
    Bug("attention reads past the position", FAKE, "FakeEngine._states", "values[ends] &= self._masks_up_to[[position % size for _, position in wanted]]", "pass"),
    Bug("positions restart at every chunk", FAKE, "FakeEngine._parts", "self._salt[first:row.end]", "self._salt[first - row.start:row.end - row.start]"),
    # ------------------------------------------------------------------------------------------------------- tiers
    Bug("a loaded page is not written", TIERS, "Tiers._bring", "self._engine.write_blocks(group, blocks, pages[count - len(blocks):count]).wait()", "pass"),
    Bug("a load that begins inside a chunk takes its first pages", TIERS, "Tiers._bring", "pages[count - len(blocks):count]", "pages[:len(blocks)]"),
    Bug("a load that ends inside a chunk takes its last pages", TIERS, "Tiers._bring", "pages[count - len(blocks):count]", "pages[len(pages) - len(blocks):]"),
    Bug("a tail is taken for a whole chunk", TIERS, "Tiers._bring", "begin, (end, wants) = (len(seq_kv.table.groups[0]), load.stretches[load.landed])", "begin, (end, wants) = (len(seq_kv.table.groups[0]), load.stretches[load.landed])\nend = -(-end // CHUNK_BLOCKS) * CHUNK_BLOCKS"),
    Bug("the block that a chunk goes on with is taken for the context's", PARTIAL_BLOCKS, "PartialBlocks.put", "pool.publish(block, key, follow, parent)", "pool.publish(block, key, tuple(tokens[end * size:(end + 1) * size]), parent)"),
    Bug("a load that ended keeps its blocks", TIERS, "Tiers._land", "self._cache.close(seq_kv, tokens)", "self._cache.close(seq_kv, tokens) if not load.landed else self._loads.pop(seq_kv)"),
    Bug("a load is never late", TIERS, "Tiers._land", "load.landed == before and self.load_policy.late(load, self.reader.alive) and (not load.over)", "False"),
    Bug("a buffer is read into while its chunk waits", STORE_READER, "StoreReader._fetch", "self._load_policy.read(size, self._clock.now() - began)", "self._load_policy.read(size, self._clock.now() - began)\nfor buffer in buffers:\n    self._buffers[len(buffer)].append(buffer)"),
    Bug("the store in memory keeps what lies in a buffer", STORE_READER, "StoreReader._fetch", "dataclasses.replace(chunk, pages=bytes(chunk.pages))", "chunk"),
    Bug("a load that stands still is never late", STORE_READER, "LoadPolicy.late", "if now - max(load.started, load.heard, alive) > STALL_SECONDS:\n    return True", "pass"),
    Bug("nobody hears that a load has ended", TIERS, "Tiers.stop", "self._answers += load.done", "pass"),
    Bug("a load goes on for a sequence that has ended", CACHE, "Cache.close", "self.below.stop(seq_kv)", "pass"),
    Bug("a sequence runs while it is loaded", CACHE, "Cache.match", "'load' if seq_kv.claim.tried else None", "None"),
    Bug("a load takes blocks that are not there", CACHE, "Cache.extend", "if any((counts[number] > self.pools[number].available for number in groups)):\n    return False", "pass"),
    Bug("blocks that a load skips are taken all the same", CACHE, "Cache.extend", "counts[number] if number in groups else 0", "counts[number]"),
    Bug("a lost chunk is read over", STORE_READER, "StoreReader.work", "if arrival is None or load.fetched == len(load.stretches):\n    load.over = True", "load.fetched += arrival is None\nif load.fetched >= len(load.stretches):\n    load.over = True"),
    Bug("the report counts what was loaded twice", SEQUENCE_KV, "StoreProgress.bring", "min(last, begin)", "last"),
    Bug("the report counts what was loaded beyond the prompt", SEQUENCE_KV, "StoreProgress.origin", "max(0, min(end, covered) - begin)", "end - begin"),
    Bug("a chunk is written under the key of the next", WAITING_CHUNKS, "PoolChunks.describe", "keys[-1]", "chain.key(max(0, last - 1), tokens)"),
    Bug("a chunk of another group is read", WRITE_BEHIND, "WriteBehind._copy", "self._engine.read_blocks(chunk.group, found)", "self._engine.read_blocks(0, found)"),
    Bug("a chunk is written with the pages that are left of it", WAITING_CHUNKS, "PoolChunks.find", "found if len(found) == len(blocks) else None", "found or None"),
    Bug("the queue has no bound", WRITE_BEHIND, "WriteBehind._fits", "self.bytes + size <= self._limits.queue_bytes or (not self.bytes and len(line) == 1)", "True"),
    Bug("the queue counts what was written for ever", WRITE_BEHIND, "WriteBehind._settle", "self.bytes -= size", "pass"),
    Bug("what the pool gives up waits for ever", WRITE_BEHIND, "WriteBehind.__init__", "pool.leaving = self._leaving", "pass"),
    Bug("a chunk is queued before what it extends", WRITE_BEHIND, "WriteBehind._leaving", "reversed(line)", "line"),
    Bug("a chunk that was given up is waited for", WRITE_BEHIND, "WriteBehind._give_up", "self._outstanding.pop(noted.chunk.key)", "self._outstanding[noted.chunk.key]"),
    Bug("a copied chunk waits in the pool, too", WRITE_BEHIND, "WriteBehind._copy", "self.waiting.unnote(chunk.key)", "pass"),
    Bug("a chunk is noted whose blocks are gone", WRITE_BEHIND, "WriteBehind._add", "self._chunks.find(noted) is None", "False"),
    Bug("a tail waits beside what takes its place", WAITING_CHUNKS, "WaitingChunks.superseded", "[key for key in noted.tails if key in self.users.get(key, ())]", "[]"),
    Bug("what a chunk has before a block that leaves is forgotten", WRITE_BEHIND, "WriteBehind._shorten", "self._wait(tail)", "pass"),
    Bug("what is given up of a preempted sequence is not noted again", WRITE_BEHIND, "WriteBehind.ended", "progress.noted = [0] * len(progress.noted)", "pass"),
    Bug("what was computed before a step that failed is not stored", SCHEDULER, "Scheduler._fail", "sequence.computed -= sequence.computed % self._block_tokens", "sequence.computed = 0"),
    Bug("an end forgets tails", WRITE_BEHIND, "WriteBehind._note_all", "self._take_tails(0)", "pass"),
    Bug("what nobody is known to go on with is never stored", WAITING_CHUNKS, "WaitingChunks.next", "self.noted or self.spare", "self.noted"),
    Bug("tails of idle contexts are not stored", WRITE_BEHIND, "WriteBehind.turn", "self._take_tails(self._limits.idle_seconds)", "pass"),
    Bug("a tail ends within a block", WRITE_BEHIND, "WriteBehind.ended", "computed // self._cache.info.block_tokens", "-(-computed // self._cache.info.block_tokens)"),
    Bug("a flush does not wait for the queue", FLUSHES, "Flushes.answer", "self.waiting and oldest() >= self.waiting[0].before", "self.waiting"),
    Bug("a flush does not say what was given up", FLUSHES, "Flushes.answer", "flush.lost", "0"),
    Bug("the memory store keeps a chunk without its parent", RAM, "RamStore.keep", "bool(chunk.parent) and chunk.parent not in self._chunks", "False"),
    Bug("the memory store evicts a chunk before what extends it", RAM, "RamStore._make_room", "self._leaves", "self._chunks"),
    Bug("the memory store evicts what is about to be extended", RAM, "RamStore._make_room", "key != parent and key not in self._pinned_chunks", "key not in self._pinned_chunks"),
    Bug("the memory store keeps a tail beside what begins with it", RAM, "RamStore.keep", "self._drop(tails)", "pass"),
    Bug("the memory store takes a tail that is a part of what it has", RAM, "RamStore.keep", "chunk.key in self._chunks or self._chunks_by_head.get(chunk.key[:HEAD_BYTES])", "chunk.key in self._chunks"),
    Bug("the memory store finds a chunk by blocks that it has not", RAM, "RamStore._remove", "self._chunks_by_head[head].discard(key)", "pass"),
    Bug("the memory store drops a chunk and keeps what extends it", RAM, "RamStore._drop", "waiting += self._children.get(key, ())", "pass"),
    Bug("the memory store grows without bound", RAM, "RamStore._make_room", "self._stats.bytes + size > self._stats.budget", "False"),
    Bug("a miss is not reported", SEQUENCE, "Sequence.start", "CacheReport(computed=self.prompt_len - covered, pool=covered - sum(brought.values()), ram=brought['ram'], disk=brought['disk'], shared=brought['shared'], load=self.kv.progress.load_seconds, miss=miss)", "CacheReport(computed=self.prompt_len - covered, pool=covered - sum(brought.values()), ram=brought['ram'], disk=brought['disk'], shared=brought['shared'], load=self.kv.progress.load_seconds, miss=None)"),
    # ------------------------------------------------------------------------------------------------- standing
    Bug("how contexts stand is forgotten", STANDING, "Standings.of", "self._of.get(id, 'idle')", "'idle'"),
    Bug("what waits goes first and what is superseded stays", STANDING, "later", "standing == 'superseded'", "standing == 'waiting'"),
    Bug("what is superseded outlives what waits", STANDING, "later", "return -math.inf", "return 2 * patience"),
    Bug("what stands otherwise now is evicted as before", STANDING, "Standings.set", "changed.append(id)", "pass"),
    # ------------------------------------------------------------------------------------------------- streaming
    Bug("the beginning of a stop string is shown", STOPS, "StopScanner.push", "self._start_of_partial", "len"),
    Bug("a stop string is shown", STOPS, "StopScanner.push", "min(found)[1]", "len(text)"),
    Bug("text goes on after a stop string", STOPS, "StopScanner.push", "self.hit = bool(found)", "pass"),
    Bug("held text is lost at the end", TEXT, "TextStream.finish", "self._stops.release()", "''"),
    Bug("an unfinished character is lost at the end", TEXT, "TextStream.finish", "self._split((rest := self._detokenizer.flush()))", "[]"),
    Bug("tokens past a stop are counted", TEXT, "TextStream.push", "if self.stopped:\n    break", "pass"),
    Bug("known tokens are reported again", TEXT, "TextStream.__init__", "self.tokens = []", "pass"),
    Bug("a character split over tokens becomes two", BYTES, "_ByteDetokenizer.push", "self._decoder.decode(b''.join([table[i] for i in ids if i not in skip]))", "self._decoder.decode(b''.join([table[i] for i in ids if i not in skip]), final=True)"),
    Bug("tokens that were read are read again", FLIGHT, "RequestState.read", "tokens, self._unread = (self._unread, [])", "tokens = self._unread"),
    Bug("events that were taken are taken again", FLIGHT, "RequestState.take", "self._events = []", "pass"),
    Bug("merging turns the order round", FLIGHT, "_one", "(delta.text for delta in deltas)", "(delta.text for delta in reversed(deltas))"),
    Bug("merging loses logprobs", FLIGHT, "RequestState._with_logprobs", "self._logprobs.take(len(kinds))", "self._logprobs.take(1)"),
    Bug("prompt logprobs come again after a worker's death", FLIGHT, "RequestState.accept", "output.prompt_logprobs[self.skip:]", "output.prompt_logprobs"),
    Bug("the next worker starts from the beginning", FLIGHT, "RequestState.resume", "tuple(self.tokens)", "self.request.generated"),
    Bug("the next worker starts the clock again", FLIGHT, "RequestState.resume", "timeout - (now - self.arrived)", "timeout"),
    Bug("a token with logprobs travels as a token only", WORKER, "_columns", "output.finish or output.logprobs or output.prompt_logprobs or output.cache or output.timing", "output.finish or output.prompt_logprobs or output.cache or output.timing"),
    # ------------------------------------------------------------------------------------------------ the disk store
    Bug("a chunk is not synced", FOLDER, "StoreFolder.write", "file.sync()", "pass"),
    Bug("the names of chunks are not synced", DISK_WRITER, "DiskWriter._rename", "self._state.sync((folder.path(one.name).parent for one in written))", "True"),
    Bug("a chunk that could not be written is reported", DISK_WRITER, "DiskWriter.keep", "plan.work[:kept]", "plan.work"),
    Bug("the room for a chunk stays reserved", DISK_WRITER, "DiskWriter._index", "state.reserved -= one.reserved", "pass"),
    Bug("what a chunk extends may go while it is written", DISK_WRITER, "DiskWriter._plan", "state.index.hold(one)\nplan.held.append(one)", "pass"),
    Bug("a write that failed leaves its file", FOLDER, "StoreFolder.write", "self.discard(temporary, sum((len(part) for part in parts)))", "pass"),
    Bug("leftovers are kept at a start", FOLDER, "StoreFolder._sift", "entry.name.startswith(_TEMPORARY) and (not entry.folder)", "False"),
    Bug("pins do not protect", DISK_INDEX, "DiskIndex._evictable", "entry.live and (not entry.children) and (not entry.held) and (not entry.pins)", "entry.live and (not entry.children) and (not entry.held)"),
    Bug("what takes the place of a pinned tail is not pinned", DISK_INDEX, "DiskIndex.add", "sum((head in self._pinned_heads for head in (*_heads(entry), _head(entry.id))))", "int(_head(entry.id) in self._pinned_heads)"),
    Bug("a tail stays on the disk beside what begins with it", DISK_WRITER, "DiskWriter._index", "[one.id for one in state.index.replaced(entry)]", "[]"),
    Bug("a tail is written that is a part of what is there", DISK_WRITER, "DiskWriter._plan", "state.index.replaces(key)", "False"),
    Bug("a start keeps tails beside what begins with them", REBUILD_INDEX, "rebuild_index", "index.family([entry.id for entry in index.live() if index.replaces(entry.id)])", "[]"),
    Bug("a file says nothing of its blocks", CHUNKS, "encode", "Name(chunk.key, chunk.parent, tag, chunk.depth, len(start) + len(pages), chunk.heads)", "Name(chunk.key, chunk.parent, tag, chunk.depth, len(start) + len(pages))"),
    Bug("a chunk is evicted before what extends it", DISK_INDEX, "DiskIndex._evictable", "entry.live and (not entry.children) and (not entry.held) and (not entry.pins)", "entry.live and (not entry.held) and (not entry.pins)"),
    Bug("uses are not noted", DISK_INDEX, "DiskIndex.use", "now > entry.used", "False"),
    Bug("a use that was inherited is forgotten at a restart", STATE, "DiskState.mark_deleted", "self._note_use(parent)", "pass"),
    Bug("uses are forgotten at a restart", DISK_MAINTENANCE, "remember_uses", "state.folder.files.touch(state.folder.path(entry.name), entry.used + ahead)", "pass"),
    Bug("what lost its last extension never becomes a leaf", DISK_INDEX, "DiskIndex.mark_deleted", "parent.children.discard(entry.id)", "pass"),
    Bug("the bytes of removed chunks are counted for ever", DISK_INDEX, "DiskIndex.forget", "self.bytes -= entry.disk", "pass"),
    Bug("dropping leaves what extends a chunk", DISK_INDEX, "DiskIndex.family", "waiting += entry.children", "pass"),
    Bug("the store does not compare tokens", DISK, "DiskStore.fetch", "chunk.tokens[:len(tokens)] != tuple(tokens)", "False"),
    Bug("leading keys are counted over a hole", DISK, "DiskStore.match_prefix", "break", "continue"),
    Bug("a damaged chunk is found again", DISK, "DiskStore.fetch", "state.drop_damaged(entry)", "pass"),
    Bug("what was dropped comes back after a power cut", DISK, "DiskStore._drop", "state.sync(sorted({state.folder.digit(id[len(self._tag):]) for id in touched}))", "pass"),
    Bug("pins are forgotten at a restart", DISK, "DiskStore._open", "state.index.pin(name, ids)", "pass"),
    Bug("pins are forgotten in a power cut", PINS, "Pins.save", "self._folder.files.sync_folder(self._path)", "pass"),
    Bug("the checksum of pages is not looked at", CHUNKS, "verify", "xxhash.xxh3_128_digest(view[pages_at:]) != header.pages_check", "False"),
    Bug("another chunk's file is believed", CHUNKS, "_verify_start", "_header_name(header, name.size) != name", "False"),
    Bug("chunks being written are not in the budget", STATE, "DiskState.make_room", "self.index.bytes + self.folder.littered + self.reserved", "self.index.bytes + self.folder.littered"),
    Bug("the chunk that comes in is not in the budget", STATE, "DiskState.make_room", "self.index.bytes + self.folder.littered + self.reserved + need", "self.index.bytes + self.folder.littered + self.reserved"),
    Bug("the store grows into the reserve", STATE, "DiskState.make_room", "need - max(free - self._reserve, freed) if need else 0", "0"),
    Bug("a disk that works again is not tried", STATE, "DiskState.works", "with self.mutex:\n    self._trouble = ''", "pass"),
    Bug("a file that could not be removed is forgotten", STATE, "DiskState.clear", "entry.going = False", "pass"),
    Bug("a sync that failed is not repeated", STATE, "DiskState.sync", "self.fail('write', error)", "self.fail('write', error)\nself._unsynced.clear()"),
    Bug("evictions are not counted", STATE, "DiskState.make_room", "self.count(evicted=cleared)", "pass"),
    Bug("orphans stay on the disk", REBUILD_INDEX, "rebuild_index", "found.junk + [(state.folder.path(entry.name), entry.disk) for entry in (*entries.values(), *replaced)]", "found.junk"),
    Bug("leftovers that could not be removed stay", DISK_MAINTENANCE, "clean", "state.folder.tidy()", "()"),
    # the check of codecs
    Bug("agreement is of the tokens that were read", CHECK, "judged", "one.top[0][0] == other.top[0][0]", "one.token == other.token"),
    Bug("agreement is with the text", CHECK, "judged", "one.top[0][0] == other.top[0][0]", "other.top[0][0] == other.token"),
    Bug("agreement is counted where they differ", CHECK, "judged", "one.top[0][0] == other.top[0][0]", "one.top[0][0] != other.top[0][0]"),
    Bug("what a codec made of the pages is not read", CHECK, "_store", "engine.write_blocks(group, ids, views).wait()", "pass"),
    Bug("raw is compared with raw", CHECK, "compare", "predict(engine, tokens, codec)", "predict(engine, tokens)"),
    Bug("a divergence forgets how likely a token is", CHECK, "_divergence", "p * (log_p[token] - log_q[token])", "log_p[token] - log_q[token]"),
    Bug("the best place counts for the worst", CHECK, "judged", "-1 - len(apart) // 100", "len(apart) // 100"),
    Bug("perplexities change places", CHECK, "judged", "Comparison(name, len(plain), agreed, _perplexity(plain), _perplexity(coded), math.fsum(apart) / len(apart), apart[-1 - len(apart) // 100], beside)", "Comparison(name, len(plain), agreed, _perplexity(coded), _perplexity(plain), math.fsum(apart) / len(apart), apart[-1 - len(apart) // 100], beside)"),
    Bug("a window's blocks are taken from the wrong place", CHECK, "_store", "range(first, first + CHUNK_BLOCKS)", "range(CHUNK_BLOCKS)"),
    # ---------------------------------------------------------------------------------------------- the token log
    Bug("a turn's end is not synced", LOG, "TokenLog.write", "if sync:\n    self._sync()", "pass"),
    Bug("a segment's name is not synced", RECOVERY, "Folder.create", "self.sync()", "pass"),
    Bug("a segment gets its name before it is synced", RECOVERY, "Folder.create", "file.sync()", "pass"),
    Bug("after a sync that failed the segment is synced again", LOG, "TokenLog.write", "self._abandon()", "pass"),
    Bug("what was not synced is lost with its segment", LOG, "TokenLog.write", "[*self._unsynced, *records]", "list(records)"),
    Bug("what only the system's memory holds is relied on", RECOVERY, "_enter", "damaged > 0 or last != SEAL", "damaged > 0"),
    Bug("a segment that was given up counts as sound", LOG, "TokenLog._abandon", "self._active.dirty = True", "pass"),
    Bug("a number is given out twice after a restart", LOG, "TokenLog._recover", "1 + max(read.records, default=0)", "max(read.records, default=1)"),
    Bug("a record's checksum is not looked at", SEGMENT, "_decode", "data[at + len(head):start] != _record_sum(header.seed, offset, head, payload)", "False"),
    Bug("reading ends at the first damage", SEGMENT, "walk", "at = data.find(mark, at + 1)\nif at < 0:\n    break", "break"),
    Bug("only the first copy of a header is read", SEGMENT, "decode_header", "(0, _COPY)", "(0,)"),
    Bug("the copy of a header lies where no release put it", SEGMENT, "", "_COPY = 4096", "_COPY = 2048"),
    Bug("a field that old records lack is required", RECORDS, "TurnRecord", "engine: bytes = b''", "engine: bytes"),
    Bug("an older record replaces a newer one", INDEX, "Index._enter", "old.lsn(old_offset) > record.lsn", "False"),
    Bug("pieces count beside the end of their turn", INDEX, "Index._enter", "piece_segment.drop(piece_offset)", "pass"),
    Bug("old segments go before the new one is there", LOG, "rewrite", "if len(records) < len(wanted):\n    log.warning('segments %s: %d records are damaged', numbers, len(wanted) - len(records))\n    if keep_all:\n        for number in numbers:\n            segments[number].stuck = True\n        return", "if len(records) < len(wanted):\n    log.warning('segments %s: %d records are damaged', numbers, len(wanted) - len(records))\n    if keep_all:\n        for number in numbers:\n            segments[number].stuck = True\n        return\nfor number in numbers:\n    folder.remove(number)\n    folder.sync()\n    folder.create(segments[number].header, b'').close()"),
    Bug("compaction forgets where a record lies now", INDEX, "Index.move", "self._places[record.kind].put(record.key, number, offset)", "pass"),
    Bug("compaction drops what only an unsynced record replaces", LOG, "TokenLog.compact", "self.write((), sync=True)", "pass"),
    Bug("compaction drops a record that cannot be read now", LOG, "rewrite", "if keep_all:\n    for number in numbers:\n        segments[number].stuck = True\n    return", "if False:\n    for number in numbers:\n        segments[number].stuck = True\n    return"),
    Bug("an erasure is not written down before it begins", LOG, "TokenLog.begin_erasure", "self.write([Record(self.next_lsn(), RecordKind.ERASE, 0, encode_keys(wanted))], sync=True)", "pass"),
    Bug("a start does not finish an erasure", LOG, "TokenLog._recall", "self._erasing.update(decode_keys(record.payload))", "pass"),
    Bug("an erasure spares what was superseded", INDEX, "Segment.holds", "keys.isdisjoint(self._superseded) and keys.isdisjoint(self._keys)", "keys.isdisjoint(self._keys)"),
    Bug("an erasure spares a segment that cannot be read", LOG, "clear", "(DAMAGED, NEW, LOG)", "(NEW, LOG)"),
    Bug("an erasure is told before the names are synced", LOG, "TokenLog._rewrite_next", "self._folder.sync()", "pass"),
    Bug("what is erased is written anew", LOG, "rewrite", "{lsn for number in numbers for lsn, key in segments[number].counting() if key not in erasing}", "{lsn for number in numbers for lsn, key in segments[number].counting()}"),
    # -------------------------------------------------------------------------------------------------------- agents
    Bug("a message is not on the disk before its answer", AGENT_SERVICE, "AgentService.begin", "await self.pending.sync(record)", "self.writer.append(record)"),
    Bug("a turn's end is told before it is on the disk", RUNNING, "RunningTurn._end", "await self._keeper.sync()", "pass"),
    Bug("the log's thread never syncs", WRITER, "Writer._group", "any((job.sync for job in waited))", "False"),
    Bug("a rollback is not on the disk", AGENT_SERVICE, "AgentService._write", "await self.pending.sync(self.pending.note(agent))", "pass"),
    Bug("a rollback is undone by a restart", AGENT_REGISTRY, "AgentRegistry._place_agents", "[turn for turn in agent.own if turn.key > lsn]", "list(agent.own)"),
    Bug("after a restart an agent stands where it was noted last", AGENT_REGISTRY, "AgentRegistry._place_agents", "later[-1] if later else self._turns.get(record.head)", "self._turns.get(record.head)"),
    Bug("a rollback that the disk refuses moves the head", AGENT_SERVICE, "AgentService.move", "agent.head = before", "pass"),
    Bug("numbers of abandoned turns are given out again", TURN_TREE, "Agent.next_number", "max((turn.number for turn in self.turns()), default=0)", "self.head.number"),
    Bug("what a rollback left is collected at once", AGENT_REGISTRY, "AgentRegistry.abandoned", "turn.at >= before or turn.key in left", "turn.at >= before"),
    Bug("a branch is collected although a fork has it", AGENT_REGISTRY, "AgentRegistry._needed_by_others", "other.keeps(seen)", "pass"),
    Bug("a fork begins where its origin stands", AGENT_SERVICE, "AgentService.fork", "msgspec.structs.replace(old, id=self.new_id(agent.tenant, id), created=now, used=now, base=at.key, head=at.key, under=at.parent_key, origin=old.id, metadata=old.metadata if metadata is None else metadata, pinned=False, left={}, moved=0.0)", "msgspec.structs.replace(old, id=self.new_id(agent.tenant, id), created=now, used=now, base=at.key, head=agent.head.key, under=at.parent_key, origin=old.id, metadata=old.metadata if metadata is None else metadata, pinned=False, left={}, moved=0.0)"),
    Bug("a fork's history goes with its origin", AGENT_REGISTRY, "AgentRegistry._drop", "keys - self._needed_by_others(agent)", "keys"),
    Bug("turns of a deleted agent stay in the log", AGENT_REGISTRY, "AgentRegistry.remove", "[agent.key, *self._drop(agent.keeps() | lost, agent)]", "[agent.key]"),
    Bug("what was sampled in an agent's name outlives it", AGENT_SERVICE, "AgentService.detach", "[*keys, *self._replays.take(agent.key), *others]", "[*keys, *others]"),
    Bug("a turn that the disk refused is listed", AGENT_SERVICE, "AgentService.begin", "self.registry.remove_turn(agent, turn)", "pass"),
    Bug("chunks that another agent has go with a deleted one", AGENT_KV, "AgentKv._shared", "[length * CHUNK_TOKENS for length in longest]", "[0] * len(longest)"),
    Bug("chunks of requests in another agent's name go with a deleted one", AGENT_KV, "AgentKv._shared", "(common_chunks(one, other) for other in tied if other[:DIGEST_BYTES] == one[:DIGEST_BYTES])", "(common_chunks(one, other) for other in tied[:0])"),
    Bug("chunks of the default tenant go with an agent of none", AGENT_REGISTRY, "AgentRegistry.salt", "self._salts.get(tenant, NOBODY)", "self._salts.get(tenant, b'')"),
    Bug("chunks of a deleted agent stay", AGENT_KV, "AgentKv._evict_all", "service.evict(one.ids, agent.salt, keep=keep, disk=True)", "service.evict(one.ids, agent.salt, keep=keep, disk=False)"),
    Bug("chunks of a deleted agent's abandoned branches stay", AGENT_KV, "AgentKv.drop", "[*agent.turns(), *agent.head.path()]", "[*agent.head.path()]"),
    # ---------------------------------------------------------------------------------------------------- sampling
    Bug("what a mask forbids may come", VOCABULARY, "_choose", "values[forbidden(line.mask, vocab)] = -np.inf", "pass"),
    Bug("the draw forgets the choice", VOCABULARY, "random_bits", "(seed, choice, position)", "(seed, 0 * choice, position)"),
    Bug("top-k keeps one token more", VOCABULARY, "_kept", "ranked(scaled, params.top_k)", "ranked(scaled, min(params.top_k + 1, vocab))"),
    Bug("top-p keeps no token that crosses it", VOCABULARY, "_kept", "int(np.searchsorted(running, goal, side='left')) + 1", "max(1, int(np.searchsorted(running, goal, side='left')))"),
    Bug("top-p is of the whole mass after top-k", VOCABULARY, "_kept", "int(running[-1]) if mass is None else mass", "int(weigh(scaled).sum())"),
    Bug("min-p is asked of the logits", VOCABULARY, "_kept", "scaled[kept] >= least", "scaled[kept] >= params.min_p - 1"),
    Bug("equal logits are ranked by the highest id", VOCABULARY, "by_rank", "np.sort(bits << 32 | ids) & 4294967295", "4294967295 - (np.sort(bits << 32 | 4294967295 - ids) & 4294967295)"),
    Bug("a penalty makes negative logits likelier", VOCABULARY, "adjust", "np.where(values > 0, values / penalty, values * penalty)", "values / penalty"),
    Bug("presence counts the prompt", VOCABULARY, "adjust", "history[row.prompt_len:]", "history"),
    Bug("frequency counts a token once", VOCABULARY, "adjust", "np.float32(params.frequency_penalty) * times", "np.float32(params.frequency_penalty)"),
    Bug("stop tokens are banned one token too long", VOCABULARY, "adjust", "line.length - row.prompt_len < params.min_tokens", "line.length - row.prompt_len <= params.min_tokens"),
    Bug("a draw is not divided by the temperature", VOCABULARY, "_choose", "scaled /= np.array([divisor(rows[i].sampling) for i in part])[:, None]", "pass"),
    Bug("the first run of a draw is passed over", VOCABULARY, "_draw_whole", "int(sums[run - 1]) if run else 0", "int(sums[run - 1])"),
    Bug("exponentials lose their power of two", VOCABULARY, "weigh", "bits += turned.view(np.int32) << 23", "pass"),
)  # fmt: skip

LAWS = (
    dict.fromkeys((STOPS, TEXT, BYTES, FLIGHT, WORKER), STREAMS)
    | dict.fromkeys(
        (DISK, STATE, DISK_WRITER, DISK_INDEX, FOLDER, CHUNKS, PINS, DISK_MAINTENANCE, REBUILD_INDEX), STORAGE
    )
    | dict.fromkeys((LOG, SEGMENT, INDEX, RECOVERY, RECOVERY, LOG, RECORDS), TOKEN_LOG)
    | dict.fromkeys((AGENT_SERVICE, AGENT_REGISTRY, TURN_TREE, RUNNING, WRITER, AGENT_KV), AGENTS)
    | {CHECK: CODECS, VOCABULARY: SAMPLING, STANDING: AGENT_DAY}
)
"""The simulator that has to find the bugs of a file; the scheduler's by default."""


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """An importer of one module from its source with a bug in it; never from cached bytecode."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._bug.module else None

    def get_filename(self, name: str) -> str:
        return self._bug.label

    def get_data(self, path: str) -> bytes:
        return ast.unparse(self._bug.tree()).encode()


def plant(bug: Bug) -> None:
    """Put a bug into this process: swap a function's code, or import the modules anew."""
    target: object = importlib.import_module(bug.module)
    names: list[str] = []
    for name in bug.where.split(".") if bug.where else ():
        target = inspect.getattr_static(target, name)
        names.append(name)
        if not isinstance(target, type):
            break
    if isinstance(target, property):
        target = target.fget
    while isinstance(target, staticmethod | classmethod) or hasattr(target, "__wrapped__"):
        target = target.__wrapped__
    if isinstance(target, FunctionType):
        whole = compile(bug.tree(), bug.label, "exec", dont_inherit=True)
        codes = [code for code in _codes(whole) if code.co_qualname == ".".join(names)]
        codes = codes if len(codes) == 1 else [code for code in codes if code.co_firstlineno == _line(target)]
        if len(codes) == 1 and codes[0].co_freevars == target.__code__.co_freevars:
            target.__code__ = codes[0]
            return
    finder = _Planted(bug)
    for module in [module for module in sys.modules if module.split(".")[0] in ("cairn", "tests")]:
        del sys.modules[module]
    sys.meta_path.insert(0, finder)
    spec = importlib.import_module(bug.module).__spec__
    if spec is None or spec.loader is not finder:
        raise RuntimeError(f"{bug.name}: the planted module was not imported")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _line(function: FunctionType) -> int:
    return function.__code__.co_firstlineno


@functools.cache
def recorded() -> dict[str, int | None]:
    """Return the schedule that found each bug in the last full hunt; None if none did."""
    return dict(json.loads(RECORD.read_text()))


def hunt(bug: Bug, first: int) -> tuple[int, str] | None:
    """Look for a bug in this process; return the seed that finds it and the message, or None."""
    plant(bug)
    logging.disable(logging.CRITICAL)
    laws = LAWS.get(bug.file, SCHEDULERS)
    simulator = importlib.import_module(laws)
    seeds = (*range(SCHEDULES[laws]), *getattr(simulator, "AGAIN", ()))
    for seed in dict.fromkeys((first if first in seeds else SCHEDULES[laws] - 1, *seeds)):
        if (message := broken(simulator.run, seed)) is not None:
            return seed, message
    return None


def broken(run: Callable[[int], object], seed: int) -> str | None:
    """Return what breaks in one schedule; None if nothing does."""

    def stuck(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the schedule hangs")

    signal.signal(signal.SIGALRM, stuck)
    signal.setitimer(signal.ITIMER_REAL, STUCK_SECONDS, 5)  # repeats: the code under test may swallow the first
    try:
        run(seed)
    except Exception as error:
        return str(error) or type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def apart(task: str, work: Callable[[], tuple[int, str] | None]) -> tuple[int, str] | None:
    """Return the result of `work` in a forked child, so that no bug outlives its turn."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            result = work()
            os.write(writer, f"{result[0]} {result[1]}".encode()[:4000] if result else b"none")
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
        raise RuntimeError(f"{task}: the hunt itself failed")
    if answer == "none":
        return None
    seed, _, text = answer.partition(" ")
    return int(seed), text


@functools.cache
def control(laws: str, seed: int) -> str | None:
    """Return what breaks in a schedule without any bug, run in a child of this process."""

    def work() -> tuple[int, str] | None:
        logging.disable(logging.CRITICAL)
        message = broken(importlib.import_module(laws).run, seed)
        return None if message is None else (seed, message)

    result = apart(f"{laws} without a bug", work)
    return None if result is None else result[1]


def judge(bug: Bug, *, prove: bool) -> tuple[tuple[int, str] | None, str | None, float]:
    """Hunt a bug; return the find, what breaks in that schedule without the bug, and the seconds taken.

    If the schedule breaks without the bug as well, the bug counts as not found.
    """
    began = time.monotonic()
    known = recorded().get(bug.name, 0)
    if known is None and not prove:
        return None, None, 0.0
    shared = known is not None and BUGS.index(bug) % SHARE == 0 and known < SOON
    first = known if known is not None and not (prove or shared) else 0
    find = apart(bug.name, functools.partial(hunt, bug, first))
    without = None if find is None else control(LAWS.get(bug.file, SCHEDULERS), find[0])
    return find, without, time.monotonic() - began


def half(bugs: Sequence[Bug]) -> list[Bug]:
    """Return half of the bugs that each simulator has to find, drawn by checksums of their files."""
    drawn = []
    for laws in SIMULATORS:
        own = [bug for bug in bugs if LAWS.get(bug.file, SCHEDULERS) == laws]
        own.sort(key=lambda bug: zlib.crc32((SOURCE / bug.file).read_bytes(), zlib.crc32(bug.name.encode())))
        drawn += own[: -(-len(own) // 2)]
    return drawn


def main(arguments: Sequence[str]) -> int:
    """Print each bug's seed and the score.

    Return 1 if fewer than 95 % were found, or if a schedule breaks without a bug.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.laws.planted_bugs")
    parser.add_argument("--prove", action="store_true", help="hunt all bugs from the first schedule on")
    parser.add_argument("--half", action="store_true", help="half of them, as the state of their files draws them")
    parser.add_argument("--record", action="store_true", help="remember which schedules found them")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in BUGS if not options.names or bug.name in options.names]
    bugs = half(bugs) if options.half else bugs
    # Bugs that may hang go first; at the end the whole hunt would wait for one of them.
    bugs.sort(key=lambda bug: LAWS.get(bug.file, SCHEDULERS) != AGENTS)
    for name in SIMULATORS:
        importlib.import_module(name)
    started, caught, sound, seeds = time.monotonic(), 0, True, dict[str, int | None]()
    judged = functools.partial(judge, prove=options.prove)
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # each thread only waits for a forked process
        for bug, (find, without, seconds) in zip(bugs, threads.map(judged, bugs), strict=True):
            caught += find is not None and without is None
            where = "NOT FOUND" if find is None else f"{find[0]:5}"
            message = "" if find is None else find[1].split(": ", 1)[-1][:100]
            if without is not None:
                sound, message = False, f"NOT COUNTED, for without the bug: {without[:200]}"
            else:
                seeds[bug.name] = find[0] if find is not None else None
            print(f"{where:>9} {seconds:5.1f} s  {bug.name:60} {message}", flush=True)
    if options.record:
        known = (recorded() if RECORD.exists() else {}) | seeds
        names = [bug.name for bug in BUGS]
        RECORD.write_text(json.dumps({name: known[name] for name in names if name in known}, indent=1) + "\n")
    print(f"planted bugs found: {caught} of {len(bugs)} in {time.monotonic() - started:.0f} s")
    return 0 if sound and caught * 40 >= len(bugs) * 38 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
