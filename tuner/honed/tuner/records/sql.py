"""Holds all SQL of the records, and nothing else."""

from __future__ import annotations

from typing import Final

from honed.protocol.params import PREFIX

APPLICATION_ID: Final = 0x686F6E65  # "hone", in the header of the file

# Statements that lead from format 0 (an empty file) to 1, from 1 to 2, ... Released ones never change.
MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """CREATE TABLE devices (
            id INTEGER PRIMARY KEY,
            key TEXT NOT NULL UNIQUE,
            identity TEXT NOT NULL
        ) STRICT""",
        """CREATE TABLE candidates (
            id INTEGER PRIMARY KEY,
            workload TEXT NOT NULL,
            device INTEGER NOT NULL REFERENCES devices (id),
            driver TEXT NOT NULL,
            compiler TEXT NOT NULL,
            trace TEXT NOT NULL,
            trace_sha256 TEXT NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('in-flight', 'done', 'quarantined')),
            owner TEXT CHECK ((owner IS NULL) = (state <> 'in-flight')),
            outcome TEXT CHECK (outcome IS NOT NULL OR state = 'in-flight')
                CHECK (outcome <> 'right' OR state <> 'quarantined'),
            reason TEXT NOT NULL DEFAULT '',
            story TEXT,
            median_s REAL CHECK (median_s > 0 OR outcome <> 'right'),
            low_s REAL,
            high_s REAL,
            repeats INTEGER,
            yardstick_ratio REAL,
            source_sha256 TEXT,
            created_s REAL NOT NULL,
            finished_s REAL,
            measured_by TEXT NOT NULL,
            UNIQUE (workload, device, driver, compiler, trace_sha256)
        ) STRICT""",
        "CREATE INDEX candidates_running ON candidates (owner) WHERE state = 'in-flight'",
        "CREATE INDEX candidates_banned ON candidates (device, source_sha256) WHERE state = 'quarantined'",
        """CREATE TABLE tasks (
            workload TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            flops REAL NOT NULL,
            bytes REAL NOT NULL
        ) STRICT""",
        """CREATE TABLE weights (
            model TEXT NOT NULL,
            workload TEXT NOT NULL REFERENCES tasks (workload),
            weight INTEGER NOT NULL CHECK (weight > 0),
            PRIMARY KEY (model, workload)
        ) STRICT""",
        """CREATE TABLE versions (
            model TEXT NOT NULL,
            version INTEGER NOT NULL,
            why TEXT NOT NULL,
            latency_s REAL,
            created_s REAL NOT NULL,
            PRIMARY KEY (model, version)
        ) STRICT""",
        """CREATE TABLE cost_models (
            device INTEGER NOT NULL REFERENCES devices (id),
            compiler TEXT NOT NULL,
            blob BLOB NOT NULL,
            sha256 TEXT NOT NULL,
            trained_on INTEGER NOT NULL,
            saved_s REAL NOT NULL,
            PRIMARY KEY (device, compiler)
        ) STRICT""",
    ),
    (
        """CREATE TABLE progress (
            id INTEGER PRIMARY KEY,
            model TEXT NOT NULL,
            trials INTEGER NOT NULL,
            latency_s REAL NOT NULL,
            created_s REAL NOT NULL
        ) STRICT""",
        "CREATE INDEX progress_of ON progress (model, id)",
    ),
    (
        """CREATE TABLE yardsticks (
            device INTEGER NOT NULL REFERENCES devices (id),
            driver TEXT NOT NULL,
            seconds REAL NOT NULL CHECK (seconds > 0),
            PRIMARY KEY (device, driver)
        ) STRICT""",
    ),
    (
        """CREATE TABLE defaults (
            workload TEXT NOT NULL,
            device INTEGER NOT NULL REFERENCES devices (id),
            driver TEXT NOT NULL,
            compiler TEXT NOT NULL,
            seconds REAL NOT NULL CHECK (seconds > 0),
            PRIMARY KEY (workload, device, driver, compiler)
        ) STRICT""",
    ),
    ("ALTER TABLE defaults ADD COLUMN rate REAL CHECK (rate >= 0)",),
    ("ALTER TABLE candidates ADD COLUMN way TEXT",),
    ("CREATE INDEX candidates_again ON candidates (workload, device) WHERE way = 'again'",),
    ("ALTER TABLE candidates ADD COLUMN clock_hz INTEGER CHECK (clock_hz > 0)",),
)

_COLUMNS: Final = """c.id, c.workload, d.key, c.driver, c.compiler, c.trace, c.trace_sha256, c.state,
    c.outcome, c.reason, c.story, c.median_s, c.low_s, c.high_s, c.repeats, c.yardstick_ratio,
    c.source_sha256, c.created_s, c.finished_s, c.measured_by, c.way"""
_FROM: Final = f"SELECT {_COLUMNS} FROM candidates c JOIN devices d ON d.id = c.device"
_FAIR: Final = "c.median_s / COALESCE(c.yardstick_ratio, 1.0)"
_HERE: Final = "d.key = :device AND c.driver = :driver AND c.compiler = :compiler"

ADD_DEVICE: Final = "INSERT INTO devices (key, identity) VALUES (:key, :identity) ON CONFLICT DO NOTHING"

SETUPS: Final = """SELECT d.identity, c.driver, c.compiler
    FROM candidates c JOIN devices d ON d.id = c.device
    GROUP BY d.id, c.driver, c.compiler ORDER BY MAX(c.id)"""

# -- candidates

# Candidates in quarantine, permanently; then those that this driver did not build, by an equal compiler or
# source.
BANNED: Final = """SELECT c.state, c.reason FROM candidates c JOIN devices d ON d.id = c.device
    WHERE d.key = :device AND c.state = 'quarantined'
        AND ((c.workload = :workload AND c.trace_sha256 = :trace_sha256) OR c.source_sha256 = :source_sha256)
    UNION ALL
    SELECT c.state, c.reason FROM candidates c JOIN devices d ON d.id = c.device
    WHERE d.key = :device AND c.workload = :workload AND c.driver = :driver
        AND c.state = 'done' AND c.outcome = 'not-built'
        AND ((c.compiler = :compiler AND c.trace_sha256 = :trace_sha256) OR c.source_sha256 = :source_sha256)
    LIMIT 1"""
RUNNING: Final = """SELECT 1 FROM candidates c JOIN devices d ON d.id = c.device
    WHERE d.key = :device AND c.state = 'in-flight'
        AND ((c.workload = :workload AND c.trace_sha256 = :trace_sha256)
            OR (c.source_sha256 = :source_sha256 AND c.owner <> :owner))
    LIMIT 1"""
BEGIN: Final = """INSERT INTO candidates
        (workload, device, driver, compiler, trace, trace_sha256, state, owner, source_sha256, created_s,
        measured_by, way)
    SELECT :workload, id, :driver, :compiler, :trace, :trace_sha256, 'in-flight', :owner, :source_sha256,
        :now, :measured_by, :way
    FROM devices WHERE key = :device
    ON CONFLICT (workload, device, driver, compiler, trace_sha256) DO UPDATE SET
        state = 'in-flight', owner = excluded.owner,
        source_sha256 = COALESCE(excluded.source_sha256, source_sha256), way = COALESCE(way, excluded.way)
    RETURNING id"""
FINISH: Final = """UPDATE candidates SET
        state = :state, owner = NULL, outcome = :outcome, reason = :reason, story = :story,
        median_s = :median_s, low_s = :low_s, high_s = :high_s, repeats = :repeats,
        yardstick_ratio = :yardstick_ratio, clock_hz = :clock_hz,
        finished_s = :now, measured_by = :measured_by
    WHERE id = :id AND state = 'in-flight' AND owner = :owner"""
CONDEMN: Final = """UPDATE candidates SET
        state = 'quarantined', outcome = 'faulted', reason = :reason, story = :story
    WHERE id = :id AND state = 'done'"""
FORGET_FIRST: Final = (
    "DELETE FROM candidates WHERE id = :id AND state = 'in-flight' AND owner = :owner AND outcome IS NULL"
)
RETURN_TO_DONE: Final = """UPDATE candidates SET state = 'done', owner = NULL
    WHERE id = :id AND state = 'in-flight' AND owner = :owner"""
OWNERS: Final = "SELECT DISTINCT owner FROM candidates WHERE state = 'in-flight'"
ABANDON: Final = """UPDATE candidates SET
        state = 'quarantined', owner = NULL, outcome = 'abandoned', reason = :reason, finished_s = :now
    WHERE state = 'in-flight' AND owner = :owner RETURNING id"""
BY_ID: Final = f"{_FROM} WHERE c.id = :id"
BEST: Final = f"""{_FROM} WHERE c.workload = :workload AND {_HERE} AND c.outcome = 'right'
    ORDER BY {_FAIR}, c.id LIMIT 1"""
DISTIL: Final = f"""WITH ranked AS (
        SELECT c.id, ROW_NUMBER() OVER (PARTITION BY c.workload ORDER BY {_FAIR}, c.id) AS place
        FROM candidates c JOIN devices d ON d.id = c.device
        WHERE {_HERE} AND c.outcome = 'right')
    {_FROM} JOIN ranked ON ranked.id = c.id WHERE place = 1 ORDER BY c.workload"""
OF_WORKLOAD: Final = f"{_FROM} WHERE c.workload = :workload AND {_HERE} ORDER BY c.id"
QUARANTINED: Final = f"{_FROM} WHERE d.key = :device AND c.state = 'quarantined' ORDER BY c.finished_s, c.id"
# Rows of a hub never change, and the result of trying one is a row of its own (store.py).
_HINT: Final = f"measured_by GLOB '{PREFIX}*'"
_STALE: Final = """d.key = :device AND c.outcome = 'right' AND c.state = 'done'
        AND (c.driver <> :driver OR c.compiler <> :compiler)
        AND NOT EXISTS (SELECT 1 FROM candidates o
            WHERE o.workload = c.workload AND o.device = c.device AND o.trace_sha256 = c.trace_sha256
                AND (o.state <> 'done' OR (o.driver = :driver AND o.compiler = :compiler)))"""
STALE: Final = f"""WITH ranked AS (
        SELECT c.id, ROW_NUMBER() OVER (PARTITION BY c.trace_sha256 ORDER BY {_FAIR}, c.id) AS place
        FROM candidates c JOIN devices d ON d.id = c.device
        WHERE c.workload = :workload AND NOT c.{_HINT} AND {_STALE})
    {_FROM} JOIN ranked ON ranked.id = c.id WHERE place = 1 ORDER BY {_FAIR}, c.id LIMIT :limit"""
_TRIED: Final = f"""candidates o CROSS JOIN candidates c ON o.workload = c.workload AND o.device = c.device
        AND o.trace_sha256 = c.trace_sha256 AND c.{_HINT} AND c.outcome = 'right' AND c.state = 'done'
    WHERE o.way = 'again' AND o.state <> 'in-flight' AND o.finished_s > :since AND NOT o.{_HINT}"""
HINTS: Final = f"""WITH ranked AS (
        SELECT c.id, ROW_NUMBER() OVER (
            PARTITION BY c.measured_by ORDER BY c.driver <> :driver, {_FAIR}, c.id) AS place
        FROM candidates c JOIN devices d ON d.id = c.device
        WHERE c.workload = :workload AND c.{_HINT} AND {_STALE})
    {_FROM} JOIN ranked ON ranked.id = c.id WHERE place <= :limit
    ORDER BY place, c.driver <> :driver, {_FAIR}"""
HINTS_LATEST: Final = f"""SELECT COALESCE(MAX(c.id), 0) FROM weights w JOIN candidates c USING (workload)
    WHERE w.model = :model AND c.{_HINT}"""
HINTS_TRIED: Final = f"""SELECT COUNT(DISTINCT o.id) FROM {_TRIED}
        AND o.workload = :workload AND o.device = (SELECT id FROM devices WHERE key = :device)"""
HINTS_TAKEN: Final = (
    f"SELECT c.measured_by, COUNT(*) FROM candidates c WHERE c.{_HINT} GROUP BY c.measured_by"
)
HINTS_WORTH: Final = f"""SELECT c.measured_by, COUNT(DISTINCT o.id),
        COUNT(DISTINCT CASE WHEN o.outcome <> 'right' OR (o.driver = c.driver AND
            o.median_s / COALESCE(o.yardstick_ratio, 1.0) > :slower * {_FAIR}) THEN o.id END)
    FROM {_TRIED} GROUP BY c.measured_by"""
HINTS_PRUNE: Final = """DELETE FROM candidates WHERE measured_by = :source AND id <= (
    SELECT id FROM candidates WHERE measured_by = :source ORDER BY id DESC LIMIT 1 OFFSET :most)"""
HINTS_PRUNE_ALL: Final = f"""DELETE FROM candidates WHERE {_HINT} AND id <= (
    SELECT id FROM candidates WHERE {_HINT} ORDER BY id DESC LIMIT 1 OFFSET :most)"""
FINISHED: Final = f"""{_FROM} WHERE c.state <> 'in-flight' AND {_HERE} ORDER BY c.id"""
IMPORT: Final = """INSERT INTO candidates
        (workload, device, driver, compiler, trace, trace_sha256, state, outcome, reason, story, median_s,
        low_s, high_s, repeats, yardstick_ratio, source_sha256, created_s, finished_s, measured_by)
    SELECT :workload, id, :driver, :compiler, :trace, :trace_sha256, :state, :outcome, :reason, :story,
        :median_s, :low_s, :high_s, :repeats, :yardstick_ratio, :source_sha256, :created_s, :finished_s,
        :measured_by
    FROM devices WHERE key = :device
    ON CONFLICT (workload, device, driver, compiler, trace_sha256) DO NOTHING"""
IMPORT_BAN: Final = """UPDATE candidates SET
        state = 'quarantined', outcome = :outcome, reason = :reason, story = :story
    WHERE workload = :workload AND driver = :driver AND compiler = :compiler AND trace_sha256 = :trace_sha256
        AND device = (SELECT id FROM devices WHERE key = :device) AND state = 'done'"""

# -- tasks, models, cost models

_INSERT_TASK: Final = (
    "INSERT INTO tasks (workload, name, flops, bytes) VALUES (:workload, :name, :flops, :bytes)"
)
PUT_TASK: Final = f"""{_INSERT_TASK} ON CONFLICT (workload) DO UPDATE SET
    name = excluded.name, flops = excluded.flops, bytes = excluded.bytes"""
ADD_TASK: Final = f"{_INSERT_TASK} ON CONFLICT DO NOTHING"
TASK: Final = "SELECT workload, name, flops, bytes FROM tasks WHERE workload = :workload"
CLEAR_WEIGHTS: Final = "DELETE FROM weights WHERE model = :model"
ADD_WEIGHT: Final = "INSERT INTO weights (model, workload, weight) VALUES (:model, :workload, :weight)"
ADD_VERSION: Final = """INSERT INTO versions (model, version, why, latency_s, created_s)
    SELECT :model, COALESCE(MAX(version), 0) + 1, :why, :latency_s, :now FROM versions WHERE model = :model
    RETURNING version"""
VERSIONS: Final = """SELECT model, version, why, latency_s, created_s FROM versions
    WHERE model = :model ORDER BY version"""
ADD_PROGRESS: Final = """INSERT INTO progress (model, trials, latency_s, created_s)
    VALUES (:model, :trials, :latency_s, :now)"""
PROGRESS: Final = "SELECT trials, latency_s, created_s FROM progress WHERE model = :model ORDER BY id"
TRIALS: Final = """SELECT outcome, COUNT(*) FROM candidates WHERE outcome IS NOT NULL
    GROUP BY outcome ORDER BY outcome"""
FAULTS: Final = "SELECT COUNT(*) FROM candidates WHERE state = 'quarantined'"
GAINS: Final = """SELECT model,
        (SELECT latency_s FROM progress f WHERE f.model = p.model ORDER BY id LIMIT 1),
        (SELECT latency_s FROM progress l WHERE l.model = p.model ORDER BY id DESC LIMIT 1)
    FROM (SELECT DISTINCT model FROM progress) p ORDER BY model"""
MODELS: Final = "SELECT DISTINCT model FROM progress UNION SELECT model FROM versions ORDER BY model"
PUT_YARDSTICK: Final = """INSERT INTO yardsticks (device, driver, seconds)
    SELECT id, :driver, :seconds FROM devices WHERE key = :device ON CONFLICT DO NOTHING"""
YARDSTICK: Final = """SELECT y.seconds FROM yardsticks y JOIN devices d ON d.id = y.device
    WHERE d.key = :device AND y.driver = :driver"""
PUT_DEFAULT: Final = """INSERT INTO defaults (workload, device, driver, compiler, seconds, rate)
    SELECT :workload, id, :driver, :compiler, :seconds, :rate FROM devices WHERE key = :device
    ON CONFLICT (workload, device, driver, compiler)
    DO UPDATE SET seconds = excluded.seconds, rate = excluded.rate"""
DEFAULTS: Final = """SELECT f.workload, f.seconds, f.rate FROM defaults f JOIN devices d ON d.id = f.device
    WHERE d.key = :device AND f.driver = :driver AND f.compiler = :compiler"""
