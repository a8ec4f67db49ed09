"""Which inference runs next: a queue that knows deadlines, priorities and fairness, and no clock.

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


# Where inputs of a request have sizes of 0: each such input's name, and those axes of it. None where several
# requests run as one, and it is not known which of them is to blame.
EmptyAxes = tuple[tuple[str, tuple[int, ...]], ...] | None


class ModelReplaced(Unavailable):
    """A request's model is another one by now, which may take other inputs: it is to be checked anew."""


def service_stops() -> Unavailable:
    """Return the error for requests that wait, or arrive, while the service is stopping."""
    return Unavailable("the service is stopping; call again when it runs")


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A request that wants to run.

    One that is `held` needs state that lies in the process of its engine. One that is `isolated` was running
    when the process of a CPU engine ended, and runs apart from others. `spared` counts the ends of processes
    for which another run was to blame.
    """

    number: int
    client: ClientId
    model: str
    priority: int
    arrived: float
    deadline: float
    attempts: int = 0
    needs_cpu_engine: bool = False  # In shapes, or with values, that only the CPU engine takes
    empty: EmptyAxes = None
    held: bool = False
    isolated: bool = False
    spared: int = 0


class Queue:
    """Tickets that wait.

    Users take turns. Of one user the first priority comes first, and within it connections take turns, each
    in its own order. A full queue makes room for who has less in it than others, so that nobody can fill it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.longest = 0  # Tickets that ever waited at once
        self._waiting: dict[int, Ticket] = {}
        self._served: dict[ClientId, int] = {}  # When it last had its turn
        self._served_users: dict[int, int] = {}
        self._turns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, ticket: Ticket) -> Ticket | None:
        """Let a ticket wait; gives the one that had to go for it, if any.

        Raises Busy where too many wait, and its user and connection have their share of them.
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

        It is the last ticket, not tried yet, of the connection with the most tickets, of the user with the
        most. Unless that user has at least 2 more than the client's user, it is of the client's user, if that
        has a connection with at least 2 more tickets than the client.
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
        """Remove and give the ticket whose turn it is, of those in time and with a servable model."""
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
            not ticket.isolated,  # Most of these are not to blame, and wait no longer than they must
            not ticket.attempts,
            self._served_users.get(client.user, 0),
            ticket.priority,
            self._served.get(client, 0),
            ticket.number,
        )

    def retry(self, ticket: Ticket) -> bool:
        """Let a ticket whose worker failed wait again, first of all; False where it had its second chance."""
        if ticket.attempts >= ATTEMPTS:
            return False
        self._waiting[ticket.number] = ticket
        return True

    def cancel(self, number: int) -> bool:
        """Remove a ticket; False where it does not wait."""
        return self._waiting.pop(number, None) is not None

    def drop_model(self, model: str, *, open_ones: bool | None = None) -> list[Ticket]:
        """Remove and give the tickets for a model, all or those with this `needs_cpu_engine`."""
        return self._remove(lambda t: t.model == model and open_ones in (None, t.needs_cpu_engine))

    def drop_empty(self, model: str, empty: EmptyAxes) -> list[Ticket]:
        """Remove and give the tickets for a model with inputs that are empty in the same places."""
        return self._remove(lambda t: t.model == model and t.empty == empty)

    def drop_all(self) -> list[Ticket]:
        """Remove and give every ticket."""
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
        """Drop what is remembered of a client that went away; its tickets must be cancelled."""
        self._served.pop(client, None)

    def _remove(self, wanted: Callable[[Ticket], bool]) -> list[Ticket]:
        removed = [t for t in self._waiting.values() if wanted(t)]
        for ticket in removed:
            del self._waiting[ticket.number]
        return removed


def full(limit: int) -> Busy:
    """Return the error for a request that finds the queue full."""
    return Busy(f"{limit} requests wait already; send them more slowly")
