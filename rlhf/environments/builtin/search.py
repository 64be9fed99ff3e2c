"""Questions about people and towns that do not exist, answered from a corpus. Its data are ``task:search``."""

import functools
import re
import sqlite3
import threading
from typing import TYPE_CHECKING

from rlhf.data.corpus import passages
from rlhf.rewards.functions import last_number

if TYPE_CHECKING:
    from rlhf.environments.chat import Chat

NUM_FOUND = 3
MAX_WORDS = 16  # of a query
TITLE_WEIGHT = 4.0  # of a word in a title; one in the text has 1


class Index:
    """Passages by relevance to a query: SQLite's full-text search, which ranks by BM25."""

    def __init__(self, titled: dict[str, str]) -> None:
        self._turn = threading.Lock()
        self._table = sqlite3.connect(":memory:", check_same_thread=False)
        self._table.execute("CREATE VIRTUAL TABLE passage USING fts5(title, text)")
        self._table.executemany("INSERT INTO passage VALUES (?, ?)", titled.items())

    def find(self, query: str, count: int) -> list[str]:
        """The ``count`` best passages that hold a word of the query, best first."""
        words = re.findall(r"\w+", query)[:MAX_WORDS]
        matches = " OR ".join(f'"{word}"' for word in words)
        if not matches:
            return []
        order = f"bm25(passage, {TITLE_WEIGHT}, 1.0), rowid"
        sql = f"SELECT title, text FROM passage WHERE passage MATCH ? ORDER BY {order} LIMIT ?"
        with self._turn:
            found = self._table.execute(sql, (matches, count)).fetchall()
        return [f"{title}: {text}" for title, text in found]


@functools.cache
def index() -> Index:
    return Index(passages())


def search(query: str) -> str:
    """Searches an encyclopedia of people and towns. Returns the passages that fit the query best."""
    return "\n".join(index().find(query, NUM_FOUND)) or "Nothing was found."


async def look_up(chat: "Chat", answer: str) -> float:
    """1 if the last number of the model's answer is the year that was asked for."""
    reply = await chat()
    return float(last_number(reply.text) == last_number(answer))
