-- The one schema, for SQLite and PostgreSQL alike: only types and clauses that both take.
-- (SQLite keeps bytes as they are in a BYTEA column; columns that are read alone stand before the large ones.)

CREATE TABLE polar_schema (
    version BIGINT NOT NULL
);

INSERT INTO polar_schema (version) VALUES (7);

CREATE TABLE sessions (
    session_id TEXT NOT NULL PRIMARY KEY,
    key_hash BYTEA NOT NULL UNIQUE,
    created_at DOUBLE PRECISION NOT NULL,
    run TEXT NOT NULL,
    status TEXT NOT NULL,
    ended_at DOUBLE PRECISION,
    reward DOUBLE PRECISION,
    metadata TEXT NOT NULL,  -- JSON
    reason TEXT,  -- why there is no reward
    turn_rewards TEXT,  -- JSON, by exchange id
    evidence TEXT  -- JSON, of tampering; null where there is none
);

CREATE INDEX sessions_by_age ON sessions (created_at, session_id);

-- Pieces of requests (items, and fields that are not small), each once, whatever session they came from.
CREATE TABLE blobs (
    digest BYTEA NOT NULL PRIMARY KEY,  -- of `data`: SHA-256, the first 16 bytes
    data BYTEA NOT NULL
);

-- An exchange is stored against `base`, an earlier one of its session (lineage.py says which):
--   its items   are the first `shared_items` items of the base, then those in `items`;
--   its fields  are the base's where `fields` is null;
--   its prompt  is the first `shared_tokens` of the base's context (prompt and sampled ids), then the ids in `prompt`.
-- One without a prompt (`shared_tokens` is null) has its base's context.
CREATE TABLE exchanges (
    exchange_id TEXT NOT NULL PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (session_id),
    seq BIGINT NOT NULL,
    base BIGINT,  -- its seq
    shared_items BIGINT NOT NULL,
    shared_tokens BIGINT,
    items BYTEA NOT NULL,  -- digests, one after the other
    fields BYTEA,  -- MessagePack: name -> [false, the raw JSON] or [true, its digest]
    list_name TEXT NOT NULL,
    dialect TEXT NOT NULL,
    parent TEXT,
    status TEXT NOT NULL,
    finish_reason TEXT,
    started_at DOUBLE PRECISION NOT NULL,
    first_token_at DOUBLE PRECISION,
    ended_at DOUBLE PRECISION NOT NULL,
    replica TEXT NOT NULL,
    continuation TEXT NOT NULL,
    branch_reason TEXT,
    untrainable TEXT,
    delivered BIGINT NOT NULL,
    logprob_kind TEXT NOT NULL,
    detail TEXT NOT NULL,  -- JSON: params, hints, sampling, versions, usage, error, context, malformed
    prompt BYTEA,  -- int32, little-endian
    sampled BYTEA,  -- int32, little-endian
    logprobs BYTEA,  -- float32, little-endian, as reported: NaN and infinities included
    reply TEXT,  -- JSON, without the log-probabilities that the harness asked for
    reply_logprobs BYTEA,  -- MessagePack (JSON has no NaN)
    routed_experts BYTEA,
    checksum BYTEA,  -- checksum.py
    UNIQUE (session_id, seq),
    FOREIGN KEY (session_id, base) REFERENCES exchanges (session_id, seq)
);

CREATE TABLE policies (
    replica TEXT NOT NULL PRIMARY KEY,  -- its URL
    version BIGINT NOT NULL
);

-- The rollout service (rollout/queue): tasks, and one row of work for each sample of each.

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
    kills BIGINT NOT NULL,  -- nodes that died while they had it, and had not been told to end
    node TEXT,  -- that has it, or had it last
    version BIGINT,  -- of the policy when it was leased
    cursor BIGINT,  -- of its end
    session_id TEXT,
    usable BIGINT,  -- 1 where it is graded, 0 where there is a reason why not
    summary TEXT,  -- JSON: what its node told of its end
    exposure DOUBLE PRECISION NOT NULL DEFAULT 0,  -- since the first of `kills`: seconds that nodes lived with it,
    control DOUBLE PRECISION NOT NULL DEFAULT 0,  -- seconds that nodes lived without any such work,
    control_deaths BIGINT NOT NULL DEFAULT 0,  -- and how many of those died
    UNIQUE (run, task_id, sample),
    FOREIGN KEY (run, task_id) REFERENCES tasks (run, task_id)
);

CREATE INDEX work_queued ON work (run, lane, rank, work_id) WHERE state = 'queued';
CREATE INDEX work_leased ON work (node) WHERE state = 'leased';
CREATE INDEX work_waiting ON work (work_id) WHERE state = 'waiting';
CREATE INDEX work_marked ON work (work_id) WHERE kills > 0 AND state <> 'done';
CREATE INDEX work_by_cursor ON work (run, cursor) WHERE cursor IS NOT NULL;

-- Sessions of tasks that were run again under the same id: retention finds them here.
CREATE TABLE replaced_sessions (
    session_id TEXT NOT NULL PRIMARY KEY,
    cursor BIGINT NOT NULL  -- of its task's end
);

CREATE INDEX replaced_by_cursor ON replaced_sessions (cursor);

CREATE TABLE consumers (
    run TEXT NOT NULL,
    consumer TEXT NOT NULL,
    cursor BIGINT NOT NULL,  -- all up to it is taken
    unit TEXT NOT NULL,  -- session, or group: then what is taken are tasks that have ended
    PRIMARY KEY (run, consumer)
);
