"""Answers of earlier epochs, by prompt, in one SQLite file, which outlives the run.

Invariant: a prompt keeps its newest `epochs` epochs and the newest EPOCH_ANSWERS answers of each, and a file
`most_bytes` of packed tokens; the oldest epochs are deleted first. Recording the same answer twice changes nothing. A
file that cannot be opened, or is not ours, is left as it is, and this process continues in memory, with the reason in
`problem`. Later failures raise sqlite3.Error. Must be called by one thread at a time. An Archive holds several; shards
and the command line use it.
"""

import sqlite3
import zlib
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tailrace.deployments.messages.context import PastAnswer

APPLICATION_ID = 0x7461696C
"""Marks a SQLite file as ours ("tail"), with the version of the tables below."""

BUSY_S = 10.0
"""Maximum seconds to wait for another process (an import) that writes to the same file."""

NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "fuse")
"""Prefixes of their types in Linux's mount table; FUSE serves many shared folders of clouds."""

EPOCH_ANSWERS = 256
"""Maximum number of answers kept of a prompt's epoch. All requests over HTTP without a step are of epoch 0: 40,000
answers to a probe took 0.4 s of the shard and 0.5 s of the coordinator for their lengths, at each further request.
"""

SLACK = 0.9
"""Share of a full file that is kept when room is made: that reads every row, so it must be rare."""

TABLES = f"""
CREATE TABLE IF NOT EXISTS answers (
    prompt_key TEXT NOT NULL, epoch INTEGER NOT NULL, sample_index INTEGER NOT NULL, group_id TEXT NOT NULL,
    weights_version INTEGER NOT NULL, reward REAL, length INTEGER NOT NULL, finished INTEGER NOT NULL,
    bytes INTEGER NOT NULL, tokens BLOB NOT NULL,
    UNIQUE (prompt_key, epoch, sample_index));
CREATE INDEX IF NOT EXISTS answers_by_age ON answers (epoch, bytes);
CREATE TABLE IF NOT EXISTS prompts (prompt_key TEXT PRIMARY KEY, group_id TEXT NOT NULL) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
"""

RECORD = """
INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (prompt_key, epoch, sample_index) DO UPDATE SET
    reward = coalesce(excluded.reward, iif(tokens = excluded.tokens, reward, NULL)),
    group_id = excluded.group_id, weights_version = excluded.weights_version, length = excluded.length,
    finished = excluded.finished, bytes = excluded.bytes, tokens = excluded.tokens
WHERE tokens != excluded.tokens OR finished != excluded.finished
    OR (excluded.reward IS NOT NULL AND reward IS NOT excluded.reward)
"""

AGE = """
DELETE FROM answers WHERE prompt_key = ?1 AND epoch <
    (SELECT min(epoch) FROM (SELECT DISTINCT epoch FROM answers WHERE prompt_key = ?1 ORDER BY epoch DESC LIMIT ?2))
"""

CROWD = """
DELETE FROM answers WHERE prompt_key = ?1 AND epoch = ?2 AND rowid <=
    (SELECT rowid FROM answers WHERE prompt_key = ?1 AND epoch = ?2 ORDER BY rowid DESC LIMIT 1 OFFSET ?3)
"""

MAKE_ROOM = """
DELETE FROM answers WHERE rowid IN (SELECT rowid FROM
    (SELECT rowid, sum(bytes) OVER (ORDER BY epoch DESC, rowid DESC) AS upto FROM answers) WHERE upto > ?)
"""

DROP_PROMPTS = "DELETE FROM prompts WHERE prompt_key NOT IN (SELECT prompt_key FROM answers)"


class Answer(NamedTuple):
    """A whole answer; `tokens` int32. `finished`: it ended by itself, not at max_tokens. `reward`: None if unknown.
    `outside_tokens`: number of its tokens that came between its turns, which do not count for its length.
    """

    sample_index: int
    weights_version: int
    reward: float | None
    finished: bool
    tokens: np.ndarray
    outside_tokens: int = 0


class PastLength(NamedTuple):
    """Length of an answer of an earlier epoch, and whether it ended by itself."""

    epoch: int
    length_tokens: int
    finished: bool


class EpochView(NamedTuple):
    """Summary of one prompt and epoch. `mean_reward`: mean over the answers with a reward."""

    epoch: int
    answers: int
    mean_length_tokens: float
    mean_reward: float | None
    packed_bytes: int


class Totals(NamedTuple):
    """Contents of a file."""

    prompts: int
    answers: int
    tokens: int
    packed_bytes: int
    oldest_epoch: int | None
    newest_epoch: int | None


class History:
    """`path`: a file, created if absent, or None for memory. Limits as in ContextConfig."""

    def __init__(self, path: Path | None, epochs: int, most_bytes: float):
        self._epochs, self._most_bytes = epochs, most_bytes
        self.problem = ""
        try:
            self._open(path)
        except (sqlite3.Error, OSError) as error:
            self.problem = f"{path}: not usable as history ({error}); this run's is kept in memory"
            self._open(None)

    def record(self, prompt_key: str, group_id: str, epoch: int, answers: Iterable[Answer]) -> int:
        """Records answers of one group. Returns the number of those that were absent or different before."""
        rows = [_row(prompt_key, group_id, epoch, answer) for answer in answers]
        with self._base:
            before, bytes_before = self._base.total_changes, self._bytes(prompt_key)
            self._base.executemany(RECORD, rows)
            changed = self._base.total_changes - before
            if changed:
                self._base.execute("INSERT OR REPLACE INTO prompts VALUES (?, ?)", (prompt_key, group_id))
                self._base.execute(AGE, (prompt_key, self._epochs))
                self._base.execute(CROWD, (prompt_key, epoch, EPOCH_ANSWERS))
                self.nbytes += self._bytes(prompt_key) - bytes_before
        if self.nbytes > self._most_bytes:
            with self._base:
                self._base.execute(MAKE_ROOM, (self._most_bytes * SLACK,))
                self._base.execute(DROP_PROMPTS)
            self.nbytes = self._bytes()
        return changed

    def reward(self, prompt_key: str, epoch: int, rewards: dict[int, float]) -> int:
        """Records rewards, by sample index, of answers that are present. Returns the number of these answers."""
        rows = [(reward, prompt_key, epoch, index) for index, reward in rewards.items()]
        with self._base:
            tell = "UPDATE answers SET reward = ? WHERE prompt_key = ? AND epoch = ? AND sample_index = ?"
            return self._base.executemany(tell, rows).rowcount

    def answers(self, prompt_key: str, but_not_of: str) -> list[PastAnswer]:
        """Returns every answer, newest epochs first, except those of one group: the one that asks."""
        ask = """SELECT epoch, weights_version, reward, tokens FROM answers WHERE prompt_key = ? AND group_id != ?
            ORDER BY epoch DESC, sample_index"""
        rows = self._base.execute(ask, (prompt_key, but_not_of))
        return [PastAnswer(prompt_key, *row, unpack(packed)) for *row, packed in rows]

    def lengths(self, prompt_key: str) -> list[PastLength]:
        """Returns the length of every answer, newest epochs first."""
        ask = """SELECT epoch, length, finished FROM answers WHERE prompt_key = ?
            ORDER BY epoch DESC, sample_index"""
        rows = self._base.execute(ask, (prompt_key,))
        return [PastLength(epoch, length, bool(finished)) for epoch, length, finished in rows]

    def epochs(self, prompt_key: str) -> list[EpochView]:
        """Returns the summaries of a prompt's epochs, newest first."""
        ask = """SELECT epoch, count(*), avg(length), avg(reward), sum(bytes) FROM answers WHERE prompt_key = ?
            GROUP BY epoch ORDER BY epoch DESC"""
        return [EpochView(*row) for row in self._base.execute(ask, (prompt_key,))]

    def totals(self) -> Totals:
        ask = """SELECT count(DISTINCT prompt_key), count(*), coalesce(sum(length), 0), coalesce(sum(bytes), 0),
            min(epoch), max(epoch) FROM answers"""
        return Totals(*self._base.execute(ask).fetchone())

    def find(self, name: str) -> tuple[str, str] | None:
        """Finds a prompt by its key, its id, or a group's id. Returns its key, and the id of the group recorded
        last.
        """
        ask = """SELECT prompt_key, group_id FROM prompts
            WHERE prompt_key = ?1 OR group_id = ?1 OR substr(group_id, -length(?1) - 1) = '/' || ?1"""
        return self._base.execute(ask, (name,)).fetchone()

    def forget(self, prompt_key: str | None = None) -> int:
        """Deletes the answers of a prompt, or all. Returns their number."""
        where, arguments = ("", ()) if prompt_key is None else (" WHERE prompt_key = ?", (prompt_key,))
        with self._base:
            gone = self._base.execute("DELETE FROM answers" + where, arguments).rowcount
            self._base.execute(DROP_PROMPTS)
        with suppress(sqlite3.OperationalError):  # the disk has no room for its copy: later answers take the free pages
            self._base.execute("VACUUM")
        self.nbytes = self._bytes()
        return gone

    def close(self) -> None:
        self._base.close()

    def _open(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)  # answers may be private
        self._base = base = sqlite3.connect(path or ":memory:", timeout=BUSY_S, check_same_thread=False)
        (tables,) = base.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and base.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            base.close()
            raise sqlite3.DatabaseError("a database of something else")
        # SQLite's WAL needs memory that all its writers share, so on a network file system it would corrupt the file.
        base.execute(f"PRAGMA journal_mode = {'DELETE' if path and is_on_network(path) else 'WAL'}")
        base.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last answers, never the file
        base.executescript(TABLES)
        self.nbytes = self._bytes()

    def _bytes(self, prompt_key: str | None = None) -> int:
        where, arguments = ("", ()) if prompt_key is None else (" WHERE prompt_key = ?", (prompt_key,))
        return self._base.execute(f"SELECT coalesce(sum(bytes), 0) FROM answers{where}", arguments).fetchone()[0]


def is_on_network(path: Path, mounts: str | None = None) -> bool:
    """Returns whether a file is on a network file system. `mounts`: text of /proc/self/mounts; read from there if
    None.
    """
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text() if table.is_file() else ""
    kinds = {Path(line.split()[1].replace("\\040", " ")): line.split()[2] for line in mounts.splitlines()}
    folder = path.resolve()
    kind = next((kinds[place] for place in (folder, *folder.parents) if place in kinds), "")
    return kind.startswith(NETWORK_FILE_SYSTEMS)


def prompt_key(text: str) -> str:
    """Names a prompt over epochs and runs: blake2b, in hex, of its text without special tokens."""
    return blake2b(text.strip().encode(), digest_size=16).hexdigest()


def pack(tokens: np.ndarray) -> bytes:
    """Packs token ids, two or four bytes each, compressed: about one byte per token of text."""
    width = np.uint16 if len(tokens) == 0 or int(tokens.max()) < 2**16 else np.uint32
    return bytes([np.dtype(width).itemsize]) + zlib.compress(tokens.astype(width).tobytes(), level=1)


def unpack(packed: bytes) -> np.ndarray:
    """Inverse of `pack`; returns int32."""
    return np.frombuffer(zlib.decompress(memoryview(packed)[1:]), f"<u{packed[0]}").astype(np.int32)


def _row(prompt_key: str, group_id: str, epoch: int, answer: Answer) -> tuple:
    packed = pack(answer.tokens)
    told = (answer.weights_version, answer.reward, len(answer.tokens) - answer.outside_tokens, answer.finished)
    return (prompt_key, epoch, answer.sample_index, group_id, *told, len(packed), packed)
