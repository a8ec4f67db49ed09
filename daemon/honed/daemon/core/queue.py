"""Provides the queue that decides which inference runs next, by deadlines, priorities and fairness.

All times are seconds on one monotonic clock that the caller passes in; nothing here waits or sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from honed.protocol.errors import Busy, Unavailable

PRIORITIES = (1, 2, 3)  # First to last
ATTEMPTS = 2  # Runs of one request: once, and once more after its worker failed


class ClientId(NamedTuple):
    """A connection, and the user at its other end."""

    user: int
    connection: int


# Names of the inputs with sizes of 0, each with the axes of these sizes. None if several requests run as one:
# then it is not known which of them is to blame for a crash.
EmptyAxes = tuple[tuple[str, tuple[int, ...]], ...] | None


class ModelReplaced(Unavailable):
    """Raised when a waiting request's model was replaced; the request must be validated again."""


def service_stops() -> Unavailable:
    """Return the error for requests that wait, or arrive, while the service is stopping."""
    return Unavailable("the service is stopping; call again when it runs")


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A request in the queue.

    A `held` request needs state that lies in the process of its engine. An `isolated` one was running when a
    CPU engine crashed, and runs in a process apart. `spared` counts crashes for which another run was blamed.
    """

    number: int
    client: ClientId
    model: str
    priority: int
    arrived: float
    deadline: float
    attempts: int = 0
    needs_cpu_engine: bool = False  # Compiled files do not accept its shapes or values
    empty: EmptyAxes = None
    held: bool = False
    isolated: bool = False
    spared: int = 0


class Queue:
    """A queue of waiting tickets that shares turns fairly and evicts when it is full.

    Users take turns. A user's tickets run by priority; within a priority connections take turns, each first
    in, first out. A full queue evicts for clients with fewer tickets than others, so that none can fill it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.longest = 0  # Maximum number of tickets that waited at once
        self._waiting: dict[int, Ticket] = {}
        self._served: dict[ClientId, int] = {}  # Number of each client's last turn
        self._served_users: dict[int, int] = {}
        self._turns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, ticket: Ticket) -> Ticket | None:
        """Enqueue a ticket, and return the ticket evicted for it, if any.

        Raises Busy if the queue is full and the ticket's user and connection have their share of it.
        """
        victim = None
        if len(self._waiting) >= self.limit:
            victim = self._victim(ticket.client)
            if victim is None:
                raise full(self.limit)
            del self._waiting[victim.number]
        self._waiting[ticket.number] = ticket
        self.longest = max(self.longest, len(self._waiting))
        return victim

    def _victim(self, client: ClientId) -> Ticket | None:
        """Return the ticket to evict for a client, if any.

        It is the last untried ticket of the largest connection of the user with the most tickets. If that
        user has fewer than 2 tickets more than the client's user, the ticket comes from the client's user
        instead, if that has a connection with at least 2 tickets more than the client's.
        """
        users = Counter(t.client.user for t in self._waiting.values())
        user = max(users, key=lambda u: (users[u], u), default=client.user)
        if users[user] < users[client.user] + 2:
            user = client.user
        mine = Counter(t.client for t in self._waiting.values() if t.client.user == user)
        if not mine:
            return None
        largest = max(mine, key=lambda c: (mine[c], c))
        if user == client.user and mine[largest] < mine[client] + 2:
            return None
        going = [t for t in self._waiting.values() if t.client == largest and not t.attempts]
        return max(going, key=lambda t: (t.priority, t.number), default=None)

    def take(self, now: float, servable: Callable[[str], bool]) -> Ticket | None:
        """Remove and return the next ticket whose deadline is ahead and whose model is servable, or None."""
        ready = [t for t in self._waiting.values() if t.deadline > now and servable(t.model)]
        if not ready:
            return None
        chosen = ready[0] if len(ready) == 1 else min(ready, key=self._rank)
        del self._waiting[chosen.number]
        self._turns += 1
        self._served[chosen.client] = self._served_users[chosen.client.user] = self._turns
        chosen.attempts += 1
        return chosen

    def _rank(self, ticket: Ticket) -> tuple[bool, bool, int, int, int, int]:
        client = ticket.client
        return (
            not ticket.isolated,  # Most of these did not cause the crash and should not wait longer
            not ticket.attempts,
            self._served_users.get(client.user, 0),
            ticket.priority,
            self._served.get(client, 0),
            ticket.number,
        )

    def retry(self, ticket: Ticket) -> None:
        """Enqueue a ticket again, ahead of untried ones; it has not had all its attempts."""
        self._waiting[ticket.number] = ticket

    def cancel(self, number: int) -> bool:
        """Remove a ticket; return False if it is not waiting."""
        return self._waiting.pop(number, None) is not None

    def drop_model(self, model: str, *, open_ones: bool | None = None) -> list[Ticket]:
        """Remove and return a model's tickets; `open_ones` selects those with this `needs_cpu_engine`."""
        return self._remove(lambda t: t.model == model and open_ones in (None, t.needs_cpu_engine))

    def drop_empty(self, model: str, empty: EmptyAxes) -> list[Ticket]:
        """Remove and return the tickets for a model whose inputs have the same empty axes."""
        return self._remove(lambda t: t.model == model and t.empty == empty)

    def drop_all(self) -> list[Ticket]:
        """Remove and return every ticket."""
        return self._remove(lambda _: True)

    def models(self) -> set[str]:
        """Return the names of the models that tickets wait for."""
        return set(self.by_model())

    def first_models(self) -> list[str]:
        """Return the names of the models that tickets wait for, in the order of their turns."""
        ranked = sorted(self._waiting.values(), key=self._rank)
        return list(dict.fromkeys(ticket.model for ticket in ranked))

    def by_model(self) -> Counter[str]:
        """Return how many tickets wait for each model."""
        return Counter(ticket.model for ticket in self._waiting.values())

    def forget_client(self, client: ClientId) -> None:
        """Drop the turns of a client that has disconnected; the caller cancels its tickets."""
        self._served.pop(client, None)

    def _remove(self, wanted: Callable[[Ticket], bool]) -> list[Ticket]:
        removed = [t for t in self._waiting.values() if wanted(t)]
        for ticket in removed:
            del self._waiting[ticket.number]
        return removed


def full(limit: int) -> Busy:
    """Return the error for a request that finds the queue full."""
    return Busy(f"{limit} requests wait already; send them more slowly")
