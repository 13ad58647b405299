"""The token log on a disk that crashes, forgets, garbles and fails: one workload from one seed, and its laws.

A workload writes, erases, compacts, is killed and opens again. A record counts as acknowledged when `write(sync=True)`
returned after it, or when a start that recovered it has synced. Every later start finds every acknowledged record that
was not erased, nothing that was never written, and not one byte of what was erased. An erasure that a crash cuts has
happened completely or not at all; damage costs only the records that it hits; and logs of an earlier release are read
correctly.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import random
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.content import Branch, Content
from cairn.agents.log import index as index_module
from cairn.agents.log import token_log as log_module
from cairn.agents.log.index import FOUND, NEWEST, RecordKind
from cairn.agents.log.records import EndRecord, TurnRecord, decode
from cairn.agents.log.segment import Record, decode_header, walk
from cairn.agents.log.token_log import TokenLog
from cairn.agents.replay_records import ReplayRecords
from tests.files import CrashFiles, Fault, SeededRng, corrupted
from tests.laws.storage_world import law

FOLDER = Path("/agents")
KINDS = (RecordKind.TURN, RecordKind.REPLAY, RecordKind.TOKENS, RecordKind.END, RecordKind.AGENT)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT)
STEPS = 25


@contextlib.contextmanager
def small_segments() -> Iterator[None]:
    """Make segments small, so that few records give many segments and much to tidy up."""
    kept = log_module.SEGMENT_BYTES, log_module.SMALL_SEGMENTS, index_module.TIDY
    log_module.SEGMENT_BYTES, log_module.SMALL_SEGMENTS, index_module.TIDY = 6000, 2, 4
    try:
        yield
    finally:
        log_module.SEGMENT_BYTES, log_module.SMALL_SEGMENTS, index_module.TIDY = kept


class Model:
    """A model of what the log must hold."""

    def __init__(self) -> None:
        self.written: dict[int, list[Record]] = {}
        """Every record ever handed over, by lsn; the lsn of one lost for ever may be used again."""
        self.accepted: dict[int, Record] = {}
        self.synced: dict[int, Record] = {}
        self.erased: set[int] = set()
        """Keys whose erasure returned."""
        self.erasing: list[set[int]] = []
        """Keys of each erasure that was begun."""

    def must(
        self, *, kept: frozenset[int] | set[int] = frozenset(), there: dict[int, Record] | None = None
    ) -> dict[int, Record]:
        """Return what no crash may lose: acknowledged, not erased, and not replaced.

        `kept`: keys that count as not erased, although their erasure was begun. `there`: the recovered records, which
        alone can replace others; by default, everything ever written.
        """
        going = set().union(*self.erasing) - kept
        known = [r for many in self.written.values() for r in many] if there is None else list(there.values())
        newest: dict[tuple[int, int], int] = {}
        for record in known:
            newest[record.kind, record.key] = max(record.lsn, newest.get((record.kind, record.key), 0))
        kept_records = {}
        for record in self.synced.values():
            kind = record.kind if record.kind in NEWEST else RecordKind.END if record.kind == RecordKind.TOKENS else 0
            if record.key not in going and newest.get((kind, record.key), 0) <= record.lsn:
                kept_records[record.lsn] = record
        return kept_records

    def check(self, log: TokenLog, files: CrashFiles) -> None:
        """Check a log that was just opened."""
        records = {record.lsn: record for record in log.recovered}
        law(len(records) == len(log.recovered), "a record is found twice")
        for lsn, record in self.must(there=records).items():
            law(records.get(lsn) == record, f"record {lsn} was acknowledged and is lost")
        for record in records.values():
            law(record in self.written[record.lsn], "a record is found that was never written")
            law(record.key not in self.erased, "an erased record is found")
        newest = [(r.kind, r.key) for r in records.values() if r.kind in NEWEST]
        law(len(newest) == len(set(newest)), "a superseded record counts")
        ended = {r.key: r.lsn for r in records.values() if r.kind == RecordKind.END}
        pieces = [r for r in records.values() if r.kind == RecordKind.TOKENS and r.lsn < ended.get(r.key, 0)]
        law(not pieces, "a piece of an answer counts beside its end")
        self.check_whole(records)
        self.check_gone(files)
        self.check_read(log, list(records.values()))

    def check_whole(self, records: dict[int, Record]) -> None:
        """Check that an interrupted erasure removed all of its records or none."""
        for keys in self.erasing:
            if keys <= self.erased or not keys.isdisjoint(self.erased):
                continue
            there = self.must(kept=keys)
            left = [lsn for lsn, record in there.items() if record.key in keys and lsn in records]
            gone = [lsn for lsn, record in there.items() if record.key in keys and lsn not in records]
            law(not left or not gone, f"an erasure is half done: {left} are left, {gone} are gone")

    def check_read(self, log: TokenLog, records: list[Record]) -> None:
        """Check that `read` finds records by kind and key, and nothing that was erased."""
        wanted = {(record.kind, record.key): record for record in records if record.kind in FOUND}
        for record, read in zip(wanted.values(), log.read(list(wanted)), strict=True):
            newer = read is not None and read in self.written[read.lsn] and read.lsn > record.lsn
            law(newer or read == record, f"record {record.lsn} cannot be read")
        gone = log.read([(kind, key) for key in self.erased for kind in FOUND])
        law(gone == [None] * (len(FOUND) * len(self.erased)), "an erased record can be read")

    def check_gone(self, files: CrashFiles) -> None:
        for data in files.files(FOLDER).values():
            for key in self.erased:
                law(text(key) not in data, "erased text is on the disk")


def text(key: int) -> bytes:
    """Return the text that every record with that key contains."""
    return b"<secret %d>" % key


class Work:
    """A log in use. Writes that the disk refuses are skipped, and the work goes on."""

    def __init__(self, files: CrashFiles, seed: int) -> None:
        self.files, self.rng, self.model = files, random.Random(seed), Model()
        self.keys: list[int] = []
        self.log: TokenLog | None = None

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            with contextlib.suppress(OSError):
                self.step()

    def open(self) -> TokenLog:
        """Return the log, opened if it is closed."""
        if self.log is not None:
            return self.log
        log = TokenLog.open(self.files, FOLDER, SeededRng(self.rng.getrandbits(32)))
        assert log is not None
        self.log = log
        self.model.check(log, self.files)
        # What a start recovers may be given out, so it must be durable once anything was synced.
        self.model.accepted = {record.lsn: record for record in log.recovered}
        log.write((), sync=True)
        self.model.synced = dict(self.model.accepted)
        return log

    def step(self) -> None:
        rng, model = self.rng, self.model
        log = self.open()
        action = rng.random()
        if action < 0.68 or not self.keys:
            self.write(log)
        elif action < 0.82:
            self.erase(log, rng.sample(self.keys, min(len(self.keys), rng.randrange(1, 3))))
        elif action < 0.94:
            log.compact()
        elif action < 0.97:
            self.log = None
            log.close()
            return
        else:
            self.die()
            return
        if action >= 0.68:
            model.check_read(log, list(model.must().values()))

    def erase(self, log: TokenLog, gone: list[int]) -> None:
        self.keys = [key for key in self.keys if key not in gone]
        self.model.erasing.append(set(gone))
        log.erase(gone)
        self.model.erased |= set(gone)
        self.model.check_gone(self.files)

    def die(self) -> None:
        """Kill the process: the system keeps its writes, the disk only those that were synced."""
        look, fault = self.files.after_change, self.files.fault
        after = self.files.kill()
        after.after_change, after.fault, after.calls, after.fired = look, fault, self.files.calls, self.files.fired
        self.files, self.log = after, None

    def write(self, log: TokenLog) -> None:
        rng, model = self.rng, self.model
        records = []
        for _ in range(rng.randrange(1, 4)):
            kind, lsn = rng.choice(KINDS), log.next_lsn()
            key = lsn if kind == RecordKind.TURN or not self.keys else rng.choice(self.keys)
            records.append(Record(lsn, kind, key, b"%d" % lsn + text(key) * rng.randrange(1, 60)))
        if rng.random() < 0.2:  # a record that a disk refused is written later, under its old number
            key = rng.choice(self.keys or [records[0].key])
            records += [Record(log.next_lsn(), RecordKind.AGENT, key, text(key) * size) for size in (1, 2)][::-1]
        for record in records:
            model.written.setdefault(record.lsn, []).append(record)
        sync = rng.random() < 0.6
        log.write(records, sync=sync)
        model.accepted |= {record.lsn: record for record in records}
        if sync:
            model.synced = dict(model.accepted)
        self.keys += [record.key for record in records if record.kind == RecordKind.TURN]


def reopen(files: CrashFiles, model: Model) -> TokenLog:
    log = TokenLog.open(files, FOLDER, SeededRng(files.rng.getrandbits(32)))
    assert log is not None
    model.check(log, files)
    return log


# -------------------------------------------------------------------------------------------------------- the harnesses


def crash_everywhere(seed: int, states: int, steps: int = STEPS) -> int:
    """Run one workload; at every change of the disk, open `states` of the disks that a crash could leave."""
    files, rng, seen = CrashFiles(seed=seed), random.Random(seed), 0
    work = Work(files, seed)

    def look(_: str) -> None:
        nonlocal seen
        for _ in range(states):
            after = work.files.crash(rng)
            if rng.random() < 0.4:
                after = after.crash_while(rng, 8, partial(TokenLog.open, after, FOLDER, SeededRng(1)))
            log = reopen(after, work.model)
            seen += 1
            if rng.random() < 0.2:
                log.write([Record(log.next_lsn(), RecordKind.REPLAY, 0, b"")], sync=True)
                log.close()

    files.after_change = look
    work.run(steps)
    return seen


def fault_at(seed: int, fault: Fault) -> None:
    """Run one workload with a fault; afterwards the disk and the log must work."""
    files = CrashFiles(seed=seed)
    files.fail(fault)
    work = Work(files, seed)
    work.run()
    work.files.heal()
    rng = random.Random(seed)
    reopen(work.files.crash(rng), work.model)
    log = work.open()  # the log recovers by itself
    work.write(log)
    log.write((), sync=True)
    law(log.trouble == "", "trouble that is over is still reported")
    work.model.synced = dict(work.model.accepted)
    while log.compact():
        pass
    work.model.check_gone(work.files)
    reopen(work.files.crash(rng), work.model)


def folder_of(seed: int) -> tuple[dict[Path, bytes], Work]:
    """Run a workload; return the segments that it leaves behind, and the workload."""
    work = Work(CrashFiles(seed=seed), seed)
    work.run(40)
    if work.log is not None:
        work.log.close()
    return {path: data for path, data in work.files.files(FOLDER).items() if path.suffix == ".log"}, work


def spoilt(segments: dict[Path, bytes], rng: random.Random) -> CrashFiles:
    """Return a disk with these segments, one of which is damaged, swapped or duplicated."""
    contents, path = dict(segments), rng.choice(list(segments))
    if rng.random() < 0.06:
        other = rng.choice(list(contents))
        contents[path], contents[other] = contents[other], contents[path]
    elif rng.random() < 0.06:
        contents[FOLDER / f"{99:016x}.log"] = contents[path]
    else:
        contents[path] = corrupted(contents[path], rng)
    return disk_of(contents, rng.getrandbits(32))


def disk_of(contents: dict[Path, bytes], seed: int) -> CrashFiles:
    files = CrashFiles(seed=seed)
    files.make_folder(FOLDER)
    for path, data in contents.items():
        files.put(path, data)
    return files


def damaged_once(segments: dict[Path, bytes], work: Work, rng: random.Random) -> bool:
    """Open one damaged folder and check that no damage is read as data; return whether it was noticed."""
    log = TokenLog.open(spoilt(segments, rng), FOLDER, SeededRng(2))
    assert log is not None
    for record in log.recovered:
        law(record in work.model.written[record.lsn], "damage was read as data")
    log.write([Record(log.next_lsn(), RecordKind.TURN, 1, b"more")], sync=True)
    log.close()
    return log.damaged > 0


def damage_costs_what_it_hits(segments: dict[Path, bytes], work: Work, rng: random.Random) -> None:
    """Flip a byte, zero a sector or break both headers: records elsewhere survive, and erased text is in no file.

    The last holds even if nothing can tell any more what a segment held.
    """
    path = rng.choice(list(segments))
    data, headers = bytearray(segments[path]), rng.random() < 0.2
    at = rng.randrange(len(data))
    start, end = (at, at + 1) if rng.random() < 0.5 else (at // 512 * 512, min(at // 512 * 512 + 512, len(data)))
    header = decode_header(bytes(data))
    law(header is not None, "a sound segment has no header")
    assert header is not None
    hit = {
        record.lsn
        for offset, record in walk(header, bytes(data))
        if headers or (offset < end and start < offset + record.size)
    }
    for one in (0, 4096) if headers else range(start, end):
        data[one] ^= 1 + rng.randrange(255)
    files = disk_of({**segments, path: bytes(data)}, rng.getrandbits(32))
    log = TokenLog.open(files, FOLDER, SeededRng(3))
    assert log is not None
    records = {record.lsn: record for record in log.recovered}
    for lsn, record in work.model.must().items():
        law(lsn in hit or records.get(lsn) == record, f"damage elsewhere cost record {lsn}")
    gone = [record.key for record in work.model.must().values() if record.lsn in hit or not headers]
    if gone:
        log.erase(gone[:1])
        for disk in (files, files.crash(rng)):
            law(not any(text(gone[0]) in data for data in disk.files(FOLDER).values()), "text in a damaged file stays")
    log.close()


def damage_for_a_moment(seed: int, rng: random.Random) -> None:
    """Let the disk return wrong bytes for a while: a compaction meanwhile must lose nothing."""
    work = Work(CrashFiles(seed=seed), seed)
    work.run(rng.randrange(20, 40))
    log = work.open()
    path = rng.choice([path for path in work.files.files(FOLDER) if path.suffix == ".log"])
    sound = work.files.files()[path]
    data = bytearray(sound)
    for at in rng.sample(range(4160, len(data)), min(6, len(data) - 4160)):
        data[at] ^= 255
    work.files.put(path, bytes(data))
    while log.compact():
        pass
    if path in work.files.files():
        work.files.put(path, sound)
    log.close()
    reopen(work.files, work.model)


FORMAT_1 = """
c-rlkd2AF_9LHzdg%&7K4iQ9QxkM;pp<F7`atNhRDA<-WEN^#Sw?pSx=gk(1#n_f;3z$MYhzKFH+udzBN^6Bgqatl%v=EONj0ZI)UL>F-
MnDt5@9fUh?Gi=9KgP^2`Sf+(d-IOp`+a|JcK+POE0--@zR1Q!%q%N67vwES8$E!FvHNyCGhpq_-
j%Iv;ic5<^sAg@mRV+*WtLfHnPrw)W|?J{S@xf|`FHsH-|QEMw#TC0H_MM-8&zHQd-
_RFkJr!rP&4M+iaO$<vc?5upX8z{7m_GrsA7A{{i-6;04re{m4a?X*3j?h8pY>OsYLb8lg-KW!QCL<m?X|9tFk(q4qQBO^rfWqO@o!|Q>tnNzLxM
LfT4)21$kOPe4-
X~tCVPz@5rdm2*2m|vFImNQ8b(1MHsdD3n}4kwVEb&Wc)fb+>8}#7*iu<hsYsU^!_j7kKI^`S#FKL^5*oK&g!PBl;J%$oM_n**?*j|e_OyyR6N^a
{h%*NHNDW7UE+|5L>&Ti%;m}CT7hTnwv65wzYj<PeL+9aA0z|);0A(0U@*7~3;}loeILWXJzzMvS3g%U0*nL>Fba$YW58H24%`pMg9pF_FcGAHN#
H>+89W41!4xnRq=9K*I+y`wf?42U@CbMm%r;_Y4oC<3G0X+?^!Nk|z~f*cSOhY`Vvq%vfTbWCECb6y4p;$Jf+s*O$OHLc6<7_{fB-MR;aZy`udzb
fcdRm{ZarI1($=pVzi;Y_3nNZ_QJLRazx1j1lS2ZJQxLS0HivK<3o#;jMM3sdH%MfQQ&Wnl%#scxq`g!nnop%2rj+V5#p^7J6yA>X%SNpv$apk6H
LKK1F}0we7Evr}C0$*QdsWJ)?515U=37k#Dt*$2rjlEl8brk-Xik?v*ls_gl;=XI@v4f8oj#&3#eCu#QAl2`tK#%ArniT;<U|DSZqSz+*&$cwq8=
hcLz&@Og5mj@mSE~5-iW&%G5V-U?Tjlbx$tuG$*+d}xcA1^ay_=&5^aX6{Tkh()n-
!B97lieY0xufoZn`ZZQK7=R(=lO+?IQ!kN8|2)1dKCfglU4kn-VSlg(k{jW>ga>LQw}CyWVr4Vl6a-eJrvDwD#Z^A}O-
wfiMSrEPY78v$eyrpSKXD|J-n!zm=ETlP%A|K%VdCQ*%@zw5I>-%rcG_Tr5TJE||Wlm!_nM$oXTkl{FH3%TKaAJSBg-
>WDhSE~|<^Ya2L;_8t?^k|~I9fw2<1W|M{iZ%1B>zt2>3gK_5Z8R#Jq*xL36>~B9USHuUxGB-
7H_K;JhbD|TtIljmJ@es#);CgicF$vRMjo^OZ5}(ms*q@U5|bkNEIklj{g%AQp|8a}>!Nk(@!j0n@5>$1_7C!x{CsTU1Z98Uv-
~;Fp3jp~=j0@9tGZKNy1VJJOM(AOU9Rq?%fx71>bbpF%z1y()V?C?ctUe2eP#IS&AoCfB1hEI2<C_`aXHsVL;%Ou6iU&9>K9J$m_a=kKi%YM-
Q18iqyIODzn(QNB6fSCIiTNxAd0@^*BQ4PXWVqUjdrv*oF7=;u{ZdgcbfB^((olui|Joq@*BHd@*86>d3*Shw+Fm}EK|NUps0dJkoE6|Xi>~IE?F
+Bd~a%e{!iIwN;40Z9DMcp4d=Ia7e)L(5=8*<hn1Og^)UR^FXqGR-
O|K)71H%3r5|0Xy*6mf3w>jRtDj7}@d3a^mA_os+uVG$V#wROX)Z}=*;E<hr+=ZLfQuIB+0Ws+jRlJZCb&fOEWVBX89qT5brbj{91=;<iMobpIJU
xw3L_5w1F6tb1p
"""
"""The only segment of a log of the first release, compressed and in base85.

It holds an agent with a finished and a cut turn, a turn that is being erased, a fork, and a replay record.
"""


def read_format_1() -> None:
    """Check that a log of the first release is read correctly, with defaults for newer fields."""
    files = disk_of({FOLDER / f"{1:016x}.log": zlib.decompress(base64.b85decode("".join(FORMAT_1.split())))}, 1)
    log = TokenLog.open(files, FOLDER, SeededRng(4))
    assert log is not None
    law(log.damaged == 0, "records of an earlier release count as damage")
    facts = [(record.lsn, record.kind, record.key) for record in log.recovered]
    known = [(1, 2, 1), (3, 1, 2), (4, 2, 4), (6, 4, 4), (7, 7, 2), (8, 2, 8), (9, 3, 8), (10, 3, 8), (12, 1, 11)]
    law(facts == [*known, (15, 6, 15)], f"records of an earlier release are read as {facts}")
    law(
        not any(b"erased" in data for data in files.files().values()),
        "an erasure of an earlier release is not finished",
    )
    registry = AgentRegistry()
    law(registry.load(log.recovered) == [], "a record of an earlier release belongs to no agent")
    ada, eve = registry.find("default", "ada"), registry.find("default", "eve")
    assert ada is not None and eve is not None
    law(
        (ada.record.ttl, ada.record.pinned, ada.record.metadata) == (86400.0, False, {"a": "b"}),
        "an agent's fields are wrong",
    )
    law((ada.head.number, ada.head.state, ada.savings.requests) == (2, "interrupted", 1), "an agent's head is wrong")
    law((eve.head.key, eve.record.origin, eve.record.pinned) == (4, "ada", True), "a fork's head is wrong")
    cut = ada.head.held
    law(cut.began.messages == ({"role": "user", "content": "What is my name?"},), "a turn's message is wrong")
    law(
        cut.answer == {"role": "assistant", "content": "You are", "reasoning_content": "hm"},
        "a cut turn's answer is wrong",
    )
    law(list(cut.tokens) == [6, 7, 8] and cut.began.engine == b"", "a cut turn's tokens are wrong")
    turn, end = log.read([(RecordKind.TURN, 4), (RecordKind.END, 4)])
    began = decode(turn.payload, TurnRecord) if turn is not None else None
    ended = decode(end.payload, EndRecord) if end is not None else None
    assert began is not None and ended is not None
    content = Content(began)
    content.end(ended)
    context = Branch([Content(TurnRecord(agent=0, number=0)), content]).context()
    law(context == [*range(10, 90), 1, 2, 3, 4, 5], "a turn's context is wrong")
    law(content.answer == {"role": "assistant", "content": "Hello, Ada."}, "a turn's answer is wrong")
    law(began.sampling is not None and began.sampling.max_tokens == 12, "a turn's sampling parameters are wrong")
    (kept,) = ReplayRecords().load(log.recovered)[b"i" * 32]
    law(kept[0] == "default" and list(kept[1].ids) == [1, 2, 3], "a replay record is wrong")
    log.close()


def run(seed: int) -> None:
    """Run one harness, chosen by the seed, as the planted bugs need it."""
    with small_segments():
        kind, rng = seed % 3, random.Random(seed)
        if seed == 0:
            read_format_1()
        if kind == 0:
            crash_everywhere(seed, states=1)
        elif kind == 1:
            calls = CrashFiles(seed=seed)
            calls.log = []
            Work(calls, seed).run()
            grave = [at for at, (one, _) in enumerate(calls.log) if one in ("append", "sync", "sync_folder", "remove")]
            for _ in range(12):
                at = rng.choice(grave) if rng.random() < 0.7 else rng.randrange(len(calls.log))
                fault_at(seed, Fault(at, rng.choice(ERRORS), sticky=rng.random() < 0.3, short=rng.random() < 0.7))
        else:
            segments, work = folder_of(seed)
            for _ in range(15):
                damaged_once(segments, work, rng)
                damage_costs_what_it_hits(segments, work, rng)
            for more in range(5):
                damage_for_a_moment(1000 * seed + more, rng)


if __name__ == "__main__":
    run(int(sys.argv[1]))
