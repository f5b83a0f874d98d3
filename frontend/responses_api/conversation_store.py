"""The conversations of the store: lists of items to which responses add theirs. Owned by store.py, in whose transactions it writes."""

import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from meshlm.frontend.responses_api.records import Conversation

Json = dict[str, Any]
SCHEMA = """
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
