"""The stored responses: a SQLite file that all frontends of the mesh share. Called by responses_api/shelf.py, in a thread.

A response that is computed in the background has a holder, the frontend that computes it, whose lease runs out if it dies. Its events
are written here before any client has them, together with the number of tokens that they tell: who takes it over goes on exactly there.
Nothing of a response is found without the key that it was made with. When there is too much, the key that has the most loses what it
uses least: no key's responses make room for another one's as long as it has less."""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from meshlm.frontend.responses_api.records import CONVERSATION, Chunk, Conversation, Stored, Written

Json = dict[str, Any]
_CONVERSATIONS = """
CREATE TABLE IF NOT EXISTS conversations(
    id TEXT PRIMARY KEY, key TEXT NOT NULL, created INTEGER NOT NULL, metadata BLOB NOT NULL, used REAL NOT NULL,
    size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS conversations_by_owner ON conversations(key, used, size);
CREATE TABLE IF NOT EXISTS items(
    conversation TEXT NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY(conversation, place));
"""


class Conversations:
    """The table of conversations. Whoever asks for items has asked `get` whose the conversation is."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def put(self, new: Conversation, now: float) -> None:
        """A new one, or one whose metadata is another now."""
        self._db.execute(
            "INSERT INTO conversations VALUES(?, ?, ?, ?, ?, ?) "
            "ON CONFLICT(id) DO UPDATE SET metadata = excluded.metadata, used = excluded.used",
            (new.id, new.key, new.created, new.metadata, now, len(new.metadata)),
        )

    def get(self, name: str, key: str, now: float) -> Conversation | None:
        """The conversation, which counts as used."""
        columns = "id, key, created, metadata"
        row = self._db.execute(f"SELECT {columns} FROM conversations WHERE id = ? AND key = ?", (name, key)).fetchone()
        if row is None:
            return None
        with suppress(sqlite3.OperationalError):  # a disk that is full can be read
            self._db.execute("UPDATE conversations SET used = ? WHERE id = ?", (now, name))
        return Conversation(*row)

    def delete(self, name: str) -> None:
        self._db.execute("DELETE FROM conversations WHERE id = ?", (name,))
        self._db.execute("DELETE FROM items WHERE conversation = ?", (name,))

    def items(self, name: str) -> list[bytes]:
        """Its items as JSON, the oldest first."""
        rows = self._db.execute("SELECT data FROM items WHERE conversation = ? ORDER BY place", (name,))
        return [data for (data,) in rows]

    def add(self, name: str, items: Sequence[Json]) -> None:
        """Adds items at the end. One that is gone meanwhile gets none."""
        encoded = [msgspec.json.encode(item) for item in items]
        size = sum(map(len, encoded))
        if not self._db.execute("UPDATE conversations SET size = size + ? WHERE id = ?", (size, name)).rowcount:
            return
        (last,) = self._db.execute(
            "SELECT coalesce(max(place), -1) FROM items WHERE conversation = ?", (name,)
        ).fetchone()
        rows = [
            (name, last + 1 + place, item["id"], data)
            for place, (item, data) in enumerate(zip(items, encoded, strict=True))
        ]
        self._db.executemany("INSERT INTO items VALUES(?, ?, ?, ?)", rows)

    def delete_item(self, name: str, item_id: str) -> bool:
        (size,) = self._db.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM items WHERE conversation = ? AND id = ?", (name, item_id)
        ).fetchone()
        self._db.execute("UPDATE conversations SET size = size - ? WHERE id = ?", (size, name))
        done = self._db.execute("DELETE FROM items WHERE conversation = ? AND id = ?", (name, item_id))
        return done.rowcount > 0


VERSION = 1
BUSY_S = 5.0
MAX_READ = 1 << 18  # bytes of events that are read at once
ENDED = ("completed", "incomplete", "failed", "cancelled")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses(
    id TEXT PRIMARY KEY, key TEXT NOT NULL, status TEXT NOT NULL, background INTEGER NOT NULL, created INTEGER NOT NULL,
    previous TEXT NOT NULL, salt TEXT NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL, holder TEXT NOT NULL, lease REAL,
    tokens INTEGER NOT NULL, next_event INTEGER NOT NULL, attempts INTEGER NOT NULL,
    answer BLOB NOT NULL, items BLOB NOT NULL, request BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_owner ON responses(key, used, size);
CREATE INDEX IF NOT EXISTS leased ON responses(lease) WHERE lease IS NOT NULL;
CREATE TABLE IF NOT EXISTS item_ids(id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY(id, response)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_response ON item_ids(response);
CREATE TABLE IF NOT EXISTS events(
    response TEXT NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY(response, first));
"""
_COLUMNS = ", ".join(Stored.__struct_fields__)


class StoreFull(Exception):
    """There is no room for one more that is computed in the background; those that are computed are not forgotten."""


class Store:
    """One file of stored responses. sqlite3.Error is the caller's to tell. `now` is the wall clock's time."""

    def __init__(self, path: Path, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # what clients said is nobody else's
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"{path} is of another version of MeshLM")
        with self._transaction():
            for statement in (_SCHEMA + _CONVERSATIONS).split(";"):
                self._db.execute(statement)
            if version != VERSION:
                self._db.execute(f"PRAGMA user_version={VERSION}")

        self.conversations = Conversations(self._db)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def put(self, new: Stored, now: float, chunk: Chunk | None = None) -> bool:
        """Adds a response with its first events, in the place of one of the same name and key that is ended. False where another has
        the name. StoreFull."""
        size = len(new.answer) + len(new.items) + len(new.request)
        values = {name: getattr(new, name) for name in Stored.__struct_fields__} | {"used": now, "size": size}
        names = ", ".join(values)
        marks = ", ".join(f":{name}" for name in values)
        updates = ", ".join(f"{name} = excluded.{name}" for name in values if name not in ("id", "key"))
        with self._transaction():
            changed = self._db.execute(
                f"INSERT INTO responses({names}) VALUES({marks}) ON CONFLICT(id) DO UPDATE SET {updates} "
                "WHERE key = excluded.key AND responses.lease IS NULL",
                values,
            ).rowcount
            if changed:
                self._forget(new.id)
            if changed and chunk is not None:
                self._add(new.id, chunk)
            if changed and new.status in ENDED:
                self._end_turn(new.id)
            self._fit(new.key if new.lease is not None else None)
        return changed > 0

    def get(self, response_id: str, key: str, now: float) -> Stored | None:
        """The response, which counts as used."""
        row = self._db.execute(
            f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND key = ?", (response_id, key)
        ).fetchone()
        if row is None:
            return None
        with suppress(sqlite3.OperationalError):  # a disk that is full can be read
            self._db.execute("UPDATE responses SET used = ? WHERE id = ?", (now, response_id))
        return _stored(row)

    def delete(self, response_id: str, key: str) -> bool:
        """A holder learns of it with its next `write`."""
        with self._transaction():
            gone = self._db.execute("DELETE FROM responses WHERE id = ? AND key = ?", (response_id, key)).rowcount
            if gone:
                self._forget(response_id)
        return gone > 0

    def cancel(self, response_id: str, key: str, answer: bytes) -> bool:
        """Ends one that is computed in the background, with this answer. A holder learns of it with its next `write`."""
        return self._db.execute(
            "UPDATE responses SET status = 'cancelled', answer = ?, lease = NULL, holder = '' "
            "WHERE id = ? AND key = ? AND lease IS NOT NULL",
            (answer, response_id, key),
        ).rowcount > 0  # fmt: skip

    def write(self, holder: str, news: Sequence[Written], lease: float) -> list[str]:
        """Writes what a holder has, and renews its leases. Gives the names of those that are not its own any more."""
        lost = []
        with self._transaction():
            for one in news:
                added = len(one.chunk.data) if one.chunk is not None else 0
                ends = one.status in ENDED
                changed = self._db.execute(
                    "UPDATE responses SET status = :status, tokens = :tokens, next_event = :next_event, size = size + :added, "
                    "lease = :lease, answer = CASE WHEN :ends THEN :answer ELSE answer END, "
                    "request = CASE WHEN :ends THEN x'' ELSE request END WHERE id = :id AND holder = :holder AND lease IS NOT NULL",
                    {
                        "status": one.status, "tokens": one.tokens, "next_event": one.next_event, "added": added,
                        "lease": None if ends else lease, "ends": ends, "answer": one.answer, "id": one.id,
                        "holder": holder,
                    },
                ).rowcount  # fmt: skip
                if not changed:
                    lost.append(one.id)
                elif one.chunk is not None:
                    self._add(one.id, one.chunk)
                if changed and ends:
                    self._end_turn(one.id)
            if any(one.chunk is not None for one in news):
                self._fit()
        return lost

    def release(self, response_id: str, holder: str, lease: float) -> None:
        """Leaves it to whoever finds it once this lease is over."""
        self._db.execute(
            "UPDATE responses SET holder = '', lease = ? WHERE id = ? AND holder = ? AND lease IS NOT NULL",
            (lease, response_id, holder),
        )

    def claim(self, holder: str, now: float, lease: float, most: int) -> list[Stored]:
        """Takes over responses whose leases are over."""
        due = "SELECT id FROM responses WHERE lease IS NOT NULL AND lease < ? LIMIT ?"
        if self._db.execute(due, (now, 1)).fetchone() is None:
            return []
        with self._transaction():
            names = [name for (name,) in self._db.execute(due, (now, most))]
            for name in names:
                self._db.execute(
                    "UPDATE responses SET holder = ?, lease = ?, attempts = attempts + 1 WHERE id = ?",
                    (holder, lease, name),
                )
            marks = ", ".join("?" * len(names))
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM responses WHERE id IN ({marks})", names).fetchall()
        return [_stored(row) for row in rows]

    def events(self, response_id: str, after: int) -> tuple[str | None, list[Chunk]]:
        """The status, None without such a response, and events behind number `after`: not all where they are many."""
        row = self._db.execute("SELECT status FROM responses WHERE id = ?", (response_id,)).fetchone()
        found: list[Chunk] = []
        size = 0
        for chunk in self._db.execute(
            "SELECT first, count, data FROM events WHERE response = ? AND first + count - 1 > ? ORDER BY first",
            (response_id, after),
        ):
            found.append(_behind(Chunk(*chunk), after))
            size += len(found[-1].data)
            if size > MAX_READ:
                break
        return (None if row is None else row[0]), found

    def find_items(self, names: Iterable[str], key: str) -> dict[str, dict[str, object]]:
        """Items of ended responses, by their names."""
        found: dict[str, dict[str, object]] = {}
        for name in names:
            row = self._db.execute(
                "SELECT items, answer FROM item_ids JOIN responses ON responses.id = response "
                "WHERE item_ids.id = ? AND key = ? LIMIT 1",
                (name, key),
            ).fetchone()
            if row is not None:
                items = [*msgspec.json.decode(row[0]), *msgspec.json.decode(row[1])["output"]]
                found |= {item["id"]: item for item in items if item["id"] == name}
        return found

    def put_conversation(self, new: Conversation, items: Sequence[dict[str, object]], now: float) -> None:
        """Adds a conversation, or items to one, or other metadata."""
        with self._transaction():
            self.conversations.put(new, now)
            self.conversations.add(new.id, items)
            self._fit()

    def delete_conversation(self, name: str) -> None:
        with self._transaction():
            self.conversations.delete(name)

    def delete_item(self, name: str, item_id: str) -> bool:
        with self._transaction():
            return self.conversations.delete_item(name, item_id)

    def _end_turn(self, response_id: str) -> None:
        """The items of a response can be referred to once it is ended, and are its conversation's: in the transaction that ends it."""
        columns = "previous, status, items, answer"
        row = self._db.execute(f"SELECT {columns} FROM responses WHERE id = ?", (response_id,)).fetchone()
        previous, status, items, answer = row
        if status not in ("completed", "incomplete"):
            return
        turn = [*msgspec.json.decode(items), *msgspec.json.decode(answer)["output"]]
        rows = [(item["id"], response_id) for item in turn]
        self._db.executemany("INSERT OR IGNORE INTO item_ids VALUES(?, ?)", rows)
        if previous.startswith(CONVERSATION):
            self.conversations.add(previous, turn)

    def _add(self, response_id: str, chunk: Chunk) -> None:
        self._db.execute("INSERT INTO events VALUES(?, ?, ?, ?)", (response_id, chunk.first, chunk.count, chunk.data))

    def _forget(self, response_id: str) -> None:
        """Deletes what stands beside the response itself."""
        self._db.execute("DELETE FROM events WHERE response = ?", (response_id,))
        self._db.execute("DELETE FROM item_ids WHERE response = ?", (response_id,))

    def _fit(self, begins: str | None = None) -> None:
        """Forgets until the rest fits: of the key that has the most, by what there is too much of, what it uses least. What is being
        computed stays. `begins`: the key for which one begins to be computed; StoreFull where that is the key with the most and
        nothing else of it can go."""
        all_of_both = "SELECT key, size FROM responses UNION ALL SELECT key, size FROM conversations"
        count, size = self._db.execute(f"SELECT count(*), coalesce(sum(size), 0) FROM ({all_of_both})").fetchone()
        if count <= self._max_count and size <= self._max_bytes:
            return
        rows = self._db.execute(f"SELECT key, count(*), sum(size) FROM ({all_of_both}) GROUP BY key")
        shares = {key: (num, num_bytes) for key, num, num_bytes in rows}
        while shares and (count > self._max_count or size > self._max_bytes):
            unit = 0 if count > self._max_count else 1
            key = max(shares, key=lambda one: shares[one][unit])
            if (found := self._least_used(key)) is None:
                if key == begins:
                    raise StoreFull
                del shares[key]  # all of it is being computed
                continue
            name, freed = found
            self._db.execute("DELETE FROM responses WHERE id = ?", (name,))
            self._forget(name)
            self.conversations.delete(name)
            shares[key] = (shares[key][0] - 1, shares[key][1] - freed)
            count, size = count - 1, size - freed

    def _least_used(self, key: str) -> tuple[str, int] | None:
        """The name and the size of what this key uses least, of what is ended."""
        row: tuple[str, int] | None = self._db.execute(
            "SELECT id, size FROM (SELECT id, size, used FROM responses WHERE key = :key AND lease IS NULL "
            "UNION ALL SELECT id, size, used FROM conversations WHERE key = :key) ORDER BY used LIMIT 1",
            {"key": key},
        ).fetchone()
        return row


def _stored(row: Sequence[object]) -> Stored:
    fields = dict(zip(Stored.__struct_fields__, row, strict=True))
    return Stored(**{**fields, "background": bool(fields["background"])})  # type: ignore[arg-type]


def _behind(chunk: Chunk, after: int) -> Chunk:
    """The chunk without the events up to number `after`."""
    skipped = after + 1 - chunk.first
    if skipped <= 0:
        return chunk
    events = chunk.data.removesuffix(b"\n\n").split(b"\n\n")[skipped:]  # JSON has no line breaks of its own
    return Chunk(after + 1, len(events), b"".join(event + b"\n\n" for event in events))
