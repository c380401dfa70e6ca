-- What makes an older database a newer one: under `-- from: N` the statements that take version N to N + 1.

-- from: 1
ALTER TABLE sessions ADD COLUMN reason TEXT;
ALTER TABLE sessions ADD COLUMN turn_rewards TEXT;
ALTER TABLE exchanges DROP COLUMN role;
ALTER TABLE exchanges DROP COLUMN agent_id;
ALTER TABLE exchanges ADD COLUMN checksum BYTEA;
UPDATE polar_schema SET version = 2;

-- from: 2
CREATE TABLE facts (
    name TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE counters (
    name TEXT NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL  -- the last one given out
);
INSERT INTO counters (name, value) VALUES ('epoch', 0), ('work', 0), ('cursor', 0);
CREATE TABLE runs (
    run TEXT NOT NULL PRIMARY KEY,
    settings TEXT NOT NULL  -- JSON
);
CREATE TABLE tasks (
    run TEXT NOT NULL,
    task_id TEXT NOT NULL,
    state TEXT NOT NULL,  -- running, completed, failed
    cancelled TEXT,  -- why no more of its sessions begin
    samples BIGINT NOT NULL,
    ended BIGINT NOT NULL,  -- of its samples, so many have a result
    usable BIGINT NOT NULL,  -- and so many a reward
    enough BIGINT,  -- usable ones that end it early
    created_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    cursor BIGINT,  -- of its end
    callback TEXT,  -- waiting, acknowledged, given_up; null where nobody is to be told
    digest BYTEA NOT NULL,  -- of the request
    request TEXT NOT NULL,  -- JSON
    PRIMARY KEY (run, task_id)
);
CREATE INDEX tasks_by_cursor ON tasks (run, cursor) WHERE cursor IS NOT NULL;
CREATE INDEX tasks_to_tell ON tasks (cursor) WHERE callback = 'waiting';
CREATE TABLE work (
    work_id BIGINT NOT NULL PRIMARY KEY,
    run TEXT NOT NULL,
    task_id TEXT NOT NULL,
    sample BIGINT NOT NULL,
    lane TEXT NOT NULL,  -- the runtime that it takes
    rank BIGINT NOT NULL,  -- the lowest goes first: minus the priority
    state TEXT NOT NULL,  -- queued, leased, waiting (for another try), done
    fence BIGINT NOT NULL,  -- leases so far
    attempt BIGINT NOT NULL,  -- tries that count
    kills BIGINT NOT NULL,  -- nodes that died while they had it
    node TEXT,  -- that has it, or had it last
    version BIGINT,  -- of the policy when it was leased
    cursor BIGINT,  -- of its end
    session_id TEXT,
    usable BIGINT,  -- 1 where it is graded, 0 where there is a reason why not
    summary TEXT,  -- JSON: what its node told of its end
    UNIQUE (run, task_id, sample),
    FOREIGN KEY (run, task_id) REFERENCES tasks (run, task_id)
);
CREATE INDEX work_queued ON work (run, lane, rank, work_id) WHERE state = 'queued';
CREATE INDEX work_leased ON work (node) WHERE state = 'leased';
CREATE INDEX work_waiting ON work (work_id) WHERE state = 'waiting';
CREATE INDEX work_by_cursor ON work (run, cursor) WHERE cursor IS NOT NULL;
CREATE TABLE consumers (
    run TEXT NOT NULL,
    consumer TEXT NOT NULL,
    cursor BIGINT NOT NULL,  -- all up to it is taken
    unit TEXT NOT NULL,  -- session, or group: then what is taken are tasks that have ended
    PRIMARY KEY (run, consumer)
);
UPDATE polar_schema SET version = 3;

-- from: 3
ALTER TABLE sessions ADD COLUMN evidence TEXT;
UPDATE polar_schema SET version = 4;

-- from: 4
ALTER TABLE work ADD COLUMN exposure DOUBLE PRECISION NOT NULL DEFAULT 0;
ALTER TABLE work ADD COLUMN control DOUBLE PRECISION NOT NULL DEFAULT 0;
ALTER TABLE work ADD COLUMN control_deaths BIGINT NOT NULL DEFAULT 0;
CREATE INDEX work_marked ON work (work_id) WHERE kills > 0 AND state <> 'done';
CREATE TABLE begun_calls (
    exchange_id TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    session_id TEXT NOT NULL,
    seq BIGINT NOT NULL,
    dialect TEXT NOT NULL,
    list_name TEXT NOT NULL,
    model TEXT NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    request_bytes BIGINT NOT NULL,
    request_digest TEXT NOT NULL
);
UPDATE polar_schema SET version = 5;

-- from: 5
DROP TABLE begun_calls;  -- gateways keep a journal of running calls beside the store
UPDATE polar_schema SET version = 6;

-- from: 6
CREATE TABLE replaced_sessions (
    session_id TEXT NOT NULL PRIMARY KEY,
    cursor BIGINT NOT NULL  -- of its task's end
);
CREATE INDEX replaced_by_cursor ON replaced_sessions (cursor);
UPDATE polar_schema SET version = 7;
