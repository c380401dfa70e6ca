-- The one schema, for SQLite and PostgreSQL alike: only types and clauses that both take.
-- (SQLite keeps bytes as they are in a BYTEA column; columns that are read alone stand before the large ones.)

CREATE TABLE polar_schema (
    version BIGINT NOT NULL
);

INSERT INTO polar_schema (version) VALUES (2);

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
    turn_rewards TEXT  -- JSON, by exchange id
);

CREATE INDEX sessions_by_age ON sessions (created_at, session_id);

-- Pieces of requests (items, and fields that are not small), each once, whatever session they came from.
CREATE TABLE blobs (
    digest BYTEA NOT NULL PRIMARY KEY,  -- of `data`: SHA-256, the first 16 bytes
    data BYTEA NOT NULL
);

-- An exchange is stored against `base`, an earlier one of its session (difference.py says which):
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
