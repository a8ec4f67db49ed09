"""The part of `hone status` on the lease and on the signals it is granted by."""

from __future__ import annotations

import pwd

from honed.daemon.idle.readings import value_text
from honed.protocol.service import IdleStatus, LeaseStatus
from honed.tool.output import Table, seconds_text, table


def lease_rows(lease: LeaseStatus, idle: IdleStatus) -> list[tuple[str, str]]:
    """Who has the device for tuning, how often tuners had it, and how fast they left."""
    rows = [("idle", "yes" if idle.idle else f"no: {idle.why}"), ("lease", _held(lease))]
    if lease.granted:
        late = f", {lease.overdue} too late" if lease.overdue else ""
        rows.append(
            ("", f"{seconds_text(lease.seconds)} in all; granted {lease.granted} times, "
                 f"revoked {lease.revoked} times{late}")
        )  # fmt: skip
    left = lease.release
    if left.count:
        rows.append(
            ("", f"left {left.count} times for a request, after {left.p50_ms:.1f} ms (median), "
                 f"{left.p99_ms:.1f} ms (p99), {left.max_ms:.1f} ms at most")
        )  # fmt: skip
    return rows


def _held(lease: LeaseStatus) -> str:
    holder = lease.holder
    waiting = f"; {lease.waiting} waiting for it" if lease.waiting else ""
    if holder is None:
        return f"free{waiting}"
    since = seconds_text(holder.since_seconds)
    who = f"held by process {holder.pid} of {_user(holder.uid)} for {since}"
    bound = f"{holder.candidate_seconds:g} s"
    if lease.state == "granted":
        return f"{who}, which leaves within {bound}{waiting}"
    told = f"told to leave {holder.revoked_seconds:.1f} s ago ({holder.why})"
    return f"{who}, {told}{f', overdue: it promised {bound}' if lease.state == 'overdue' else ''}{waiting}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def signals(idle: IdleStatus) -> Table:
    """Each signal with value and verdict."""
    return table(
        ("signal", ">value", "verdict", ""),
        [(r.signal, value_text(r.value, r.unit), r.verdict, r.text) for r in idle.readings],
    )
