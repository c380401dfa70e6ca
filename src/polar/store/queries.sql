-- Every statement that the store runs, by name; `:name` is a parameter. All of them run on SQLite and on PostgreSQL.

-- name: schema_version
SELECT version FROM polar_schema;

-- name: store_id
SELECT value FROM facts WHERE name = 'store_id';

-- name: make_store_id
INSERT INTO facts (name, value) VALUES ('store_id', :value) ON CONFLICT DO NOTHING;

-- name: write_probe
INSERT INTO facts (name, value) VALUES ('write_probe', :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: insert_session
INSERT INTO sessions (
    session_id, key_hash, created_at, run, status, ended_at, reward, metadata, reason, turn_rewards, evidence
) VALUES (
    :session_id, :key_hash, :created_at, :run, :status, :ended_at, :reward, :metadata, :reason, :turn_rewards, :evidence
);

-- name: end_session
-- The first end stays, and the first verdict; a reward that comes after a reason takes its place.
UPDATE sessions
SET status = 'ended', ended_at = COALESCE(ended_at, :ended_at), reward = COALESCE(reward, :reward),
    reason = CASE WHEN COALESCE(reward, :reward) IS NULL THEN COALESCE(reason, :reason) END,
    turn_rewards = COALESCE(turn_rewards, :turn_rewards), evidence = COALESCE(evidence, :evidence)
WHERE session_id = :session_id
RETURNING session_id, key_hash, created_at, run, status, ended_at, reward, metadata, reason, turn_rewards, evidence;

-- name: disown_session
-- Another session stands for the same sample: this one has no reward, whatever it earned.
UPDATE sessions SET reward = NULL, turn_rewards = NULL, reason = :reason WHERE session_id = :session_id;

-- name: standing_session
SELECT session_id FROM work WHERE work_id = :work_id AND run = :run AND task_id = :task_id AND state = 'done';

-- name: session
SELECT session_id, key_hash, created_at, run, status, ended_at, reward, metadata, reason, turn_rewards, evidence
FROM sessions
WHERE session_id = :session_id;

-- name: session_by_key
SELECT session_id, key_hash, created_at, run, status, ended_at, reward, metadata, reason, turn_rewards, evidence
FROM sessions
WHERE key_hash = :key_hash;

-- name: newest_sessions
SELECT session_id, key_hash, created_at, run, status, ended_at, reward, metadata, reason, turn_rewards, evidence
FROM sessions
ORDER BY created_at DESC, session_id DESC
LIMIT :limit;

-- name: sessions_before
SELECT session_id, key_hash, created_at, run, status, ended_at, reward, metadata, reason, turn_rewards, evidence
FROM sessions
WHERE (created_at, session_id) < (:created_at, :session_id)
ORDER BY created_at DESC, session_id DESC
LIMIT :limit;

-- name: insert_blob
INSERT INTO blobs (digest, data) VALUES (:digest, :data) ON CONFLICT DO NOTHING;

-- name: blob
SELECT data FROM blobs WHERE digest = :digest;

-- name: blobs
SELECT digest, data FROM blobs WHERE digest IN (
    :digest_a, :digest_b, :digest_c, :digest_d, :digest_e, :digest_f, :digest_g, :digest_h,
    :digest_i, :digest_j, :digest_k, :digest_l, :digest_m, :digest_n, :digest_o, :digest_p
);

-- name: insert_exchange
INSERT INTO exchanges (
    exchange_id, session_id, seq, base, shared_items, shared_tokens, items, fields, list_name, dialect, parent,
    status, finish_reason, started_at, first_token_at, ended_at, replica, continuation, branch_reason,
    untrainable, delivered, logprob_kind, detail, prompt, sampled, logprobs, reply, reply_logprobs, routed_experts,
    checksum
) VALUES (
    :exchange_id, :session_id, :seq, :base, :shared_items, :shared_tokens, :items, :fields, :list_name, :dialect,
    :parent, :status, :finish_reason, :started_at, :first_token_at, :ended_at, :replica,
    :continuation, :branch_reason, :untrainable, :delivered, :logprob_kind, :detail, :prompt, :sampled, :logprobs,
    :reply, :reply_logprobs, :routed_experts, :checksum
);

-- name: stored_exchange
SELECT session_id, seq, checksum, parent FROM exchanges WHERE exchange_id = :exchange_id;

-- name: amend_exchange
UPDATE exchanges SET status = :status, delivered = :delivered WHERE exchange_id = :exchange_id RETURNING exchange_id;

-- name: next_exchanges
SELECT
    exchange_id, session_id, seq, base, shared_items, shared_tokens, items, fields, list_name, dialect, parent,
    status, finish_reason, started_at, first_token_at, ended_at, replica, continuation, branch_reason,
    untrainable, delivered, logprob_kind, detail, prompt, sampled, logprobs, reply, reply_logprobs, routed_experts,
    checksum
FROM exchanges
WHERE session_id = :session_id AND seq > :after
ORDER BY seq
LIMIT :limit;

-- name: details
SELECT status, detail FROM exchanges WHERE session_id = :session_id;

-- name: next_seq
SELECT COALESCE(MAX(seq) + 1, 0) FROM exchanges WHERE session_id = :session_id;

-- name: latest_request_links
-- All of a session with one lineage; of one with several, those from the exchange on that began the latest.
SELECT seq, exchange_id, base, shared_items, items, fields
FROM exchanges
WHERE session_id = :session_id AND seq >= (
    SELECT CASE WHEN COUNT(*) > 1 THEN MAX(seq) ELSE 0 END
    FROM exchanges
    WHERE session_id = :session_id AND base IS NULL
)
ORDER BY seq;

-- name: request_link
SELECT base, shared_items, items, fields FROM exchanges WHERE session_id = :session_id AND seq = :seq;

-- name: token_link
SELECT base, shared_tokens, prompt, sampled FROM exchanges WHERE session_id = :session_id AND seq = :seq;

-- name: set_policy
INSERT INTO policies (replica, version) VALUES (:replica, :version)
ON CONFLICT (replica) DO UPDATE SET version = excluded.version;

-- name: policies
SELECT replica, version FROM policies;

-- name: session_exchanges
SELECT
    exchange_id, session_id, seq, base, shared_items, shared_tokens, items, fields, list_name, dialect, parent,
    status, finish_reason, started_at, first_token_at, ended_at, replica, continuation, branch_reason,
    untrainable, delivered, logprob_kind, detail, prompt, sampled, logprobs, reply, reply_logprobs, routed_experts,
    checksum
FROM exchanges
WHERE session_id = :session_id
ORDER BY seq;

-- name: can_record_interrupted
-- A row where the session exists, and neither this call nor another one in its place is recorded.
SELECT 1 FROM sessions s
WHERE s.session_id = :session_id
    AND NOT EXISTS (SELECT 1 FROM exchanges WHERE exchange_id = :exchange_id)
    AND NOT EXISTS (SELECT 1 FROM exchanges WHERE session_id = :session_id AND seq = :seq);
