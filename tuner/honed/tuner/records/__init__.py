"""Keeps what tuning has learned in SQLite: candidates and their verdicts, tasks and versions.

with Records.open(path) as records:
    for candidate in records.quarantine_abandoned():
        ...  # it was running when the tuner or the machine stopped; it is in quarantine now
    number = records.begin(NewCandidate(workload=key, setup=setup, trace=trace))
    verdict = measure(...)
    records.finish(number, verdict)
"""
