-- The queue's statements, by name; `:name` is a parameter. All of them run on SQLite and on PostgreSQL.

-- name: fact
SELECT value FROM facts WHERE name = :name;

-- name: save_fact
INSERT INTO facts (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: counter
SELECT value FROM counters WHERE name = :name;

-- name: lock_counter
-- Whoever has changed the row holds it until the transaction ends: no other server starts meanwhile.
UPDATE counters SET value = value WHERE name = :name RETURNING value;

-- name: advance_counter
UPDATE counters SET value = value + :count WHERE name = :name RETURNING value;

-- name: runs
SELECT run, settings FROM runs;

-- name: save_run
INSERT INTO runs (run, settings) VALUES (:run, :settings) ON CONFLICT (run) DO UPDATE SET settings = excluded.settings;

-- name: insert_task
INSERT INTO tasks (
    run, task_id, state, samples, ended, usable, enough, created_at, callback, digest, request
) VALUES (
    :run, :task_id, 'running', :samples, 0, 0, :enough, :created_at, :callback, :digest, :request
)
ON CONFLICT DO NOTHING
RETURNING task_id;

-- name: insert_work
INSERT INTO work (work_id, run, task_id, sample, lane, rank, state, fence, attempt, kills)
VALUES (:work_id, :run, :task_id, :sample, :lane, :rank, 'queued', 0, 0, 0);

-- name: task
SELECT run, task_id, state, cancelled, samples, ended, usable, enough, created_at, ended_at, cursor, callback, digest,
    request
FROM tasks
WHERE run = :run AND task_id = :task_id;

-- name: tasks_after
SELECT run, task_id, state, cancelled, samples, ended, usable, enough, created_at, ended_at, cursor, callback, digest,
    request
FROM tasks
WHERE run = :run AND cursor > :after
ORDER BY cursor
LIMIT :limit;

-- name: tasks_awaiting_callback
SELECT run, task_id, state, cancelled, samples, ended, usable, enough, created_at, ended_at, cursor, callback, digest,
    request
FROM tasks
WHERE callback = 'waiting' AND cursor > :after
ORDER BY cursor
LIMIT :limit;

-- name: redirect_callback
UPDATE tasks SET request = :request, callback = 'waiting' WHERE run = :run AND task_id = :task_id;

-- name: recent_tasks
SELECT run, task_id, state, cancelled, samples, ended, usable, enough, created_at, ended_at, cursor, callback, digest,
    request
FROM tasks
WHERE run = :run
ORDER BY created_at DESC, task_id
LIMIT :limit;

-- name: set_callback_state
UPDATE tasks SET callback = :callback WHERE run = :run AND task_id = :task_id AND callback = 'waiting';

-- name: task_work
SELECT work_id, run, task_id, sample, state, fence, attempt, kills, node, version, cursor, session_id, summary
FROM work
WHERE run = :run AND task_id = :task_id
ORDER BY sample;

-- name: work_after
SELECT work_id, run, task_id, sample, state, fence, attempt, kills, node, version, cursor, session_id, summary
FROM work
WHERE run = :run AND cursor > :after
ORDER BY cursor
LIMIT :limit;

-- name: lease_candidates
SELECT w.work_id, w.rank, w.kills, w.fence, w.task_id, w.sample, w.attempt, t.digest, t.request
FROM work w
JOIN tasks t ON t.run = w.run AND t.task_id = w.task_id
WHERE w.state = 'queued' AND w.run = :run AND w.lane = :lane AND w.kills <= :most_kills
    AND (w.kills < :suspect OR w.control >= :rest * w.exposure)
ORDER BY w.rank, w.work_id
LIMIT :limit;

-- name: lease
UPDATE work SET state = 'leased', node = :node, fence = fence + 1, version = :version
WHERE work_id = :work_id AND state = 'queued';

-- name: node_leases
SELECT work_id, fence, kills FROM work WHERE state = 'leased' AND node = :node;

-- name: leased_work
SELECT w.work_id, w.fence, w.run, w.lane, w.task_id, w.sample, w.attempt, w.version, t.cancelled, t.digest, t.request
FROM work w
JOIN tasks t ON t.run = w.run AND t.task_id = w.task_id
WHERE w.work_id = :work_id;

-- name: leases
SELECT w.work_id, w.fence, w.run, w.lane, w.task_id, w.node, w.version, t.cancelled, t.request
FROM work w
JOIN tasks t ON t.run = w.run AND t.task_id = w.task_id
WHERE w.state = 'leased' AND w.work_id > :after
ORDER BY w.work_id
LIMIT :limit;

-- name: finish
UPDATE work
SET state = 'done', session_id = :session_id, usable = :usable, summary = :summary, cursor = :cursor
WHERE work_id = :work_id AND fence = :fence AND state = :state
RETURNING run, task_id, sample, lane;

-- name: work
SELECT work_id, run, task_id, sample, state, fence, attempt, kills, node, version, cursor, session_id, summary
FROM work
WHERE work_id = :work_id;

-- name: count_end
-- With the last of its samples, the task ends.
UPDATE tasks
SET ended = ended + 1,
    usable = usable + :usable,
    state = CASE WHEN ended + 1 < samples THEN state WHEN usable + :usable > 0 THEN 'completed' ELSE 'failed' END,
    ended_at = CASE WHEN ended + 1 = samples THEN :now END,
    cursor = CASE WHEN ended + 1 = samples THEN :cursor END
WHERE run = :run AND task_id = :task_id
RETURNING state, cursor, usable, enough, cancelled, callback;

-- name: retry
UPDATE work SET state = 'waiting', attempt = attempt + 1
WHERE work_id = :work_id AND fence = :fence AND state = 'leased' AND attempt + 1 < :attempts
    AND NOT EXISTS (
        SELECT 1 FROM tasks t WHERE t.run = work.run AND t.task_id = work.task_id AND t.cancelled IS NOT NULL
    )
RETURNING run, task_id, sample, lane;

-- name: release
UPDATE work SET state = 'queued', kills = kills + :killed
WHERE work_id = :work_id AND fence = :fence AND state = 'leased'
    AND NOT EXISTS (
        SELECT 1 FROM tasks t WHERE t.run = work.run AND t.task_id = work.task_id AND t.cancelled IS NOT NULL
    )
RETURNING run, task_id, sample, lane;

-- name: suspect_work
-- Work under which nodes have died, and that has not ended.
SELECT work_id, node, state FROM work WHERE kills > 0 AND state <> 'done';

-- name: add_exposure
UPDATE work SET exposure = exposure + :seconds WHERE work_id = :work_id;

-- name: add_control
UPDATE work SET control = control + :seconds WHERE kills > 0 AND state <> 'done';

-- name: add_control_death
UPDATE work SET control_deaths = control_deaths + 1 WHERE kills > 0 AND state <> 'done';

-- name: suspect_record
SELECT kills, exposure, control, control_deaths FROM work WHERE work_id = :work_id;

-- name: retract_kill
UPDATE work SET kills = kills - 1 WHERE work_id = :work_id AND kills > 0 AND state <> 'done';

-- name: requeue
UPDATE work SET state = 'queued' WHERE work_id = :work_id AND state = 'waiting' RETURNING run, lane;

-- name: waiting_work
SELECT work_id FROM work WHERE state = 'waiting';

-- name: cancel_task
UPDATE tasks SET cancelled = :reason
WHERE run = :run AND task_id = :task_id AND state = 'running' AND cancelled IS NULL;

-- name: counts
-- Each part is read out of an index of its own, however much is done already.
SELECT 'queued', run, lane, COUNT(*) FROM work WHERE state = 'queued' GROUP BY run, lane
UNION ALL
SELECT 'leased', run, lane, COUNT(*) FROM work WHERE state = 'leased' GROUP BY run, lane
UNION ALL
SELECT 'waiting', run, lane, COUNT(*) FROM work WHERE state = 'waiting' GROUP BY run, lane;

-- name: totals
SELECT run, COUNT(*), SUM(ended), SUM(usable) FROM tasks GROUP BY run;

-- name: usable_after
SELECT COUNT(*) FROM work WHERE run = :run AND cursor > :after AND usable = 1;

-- name: usable_in_tasks_after
-- A group is taken as a whole: sessions of one that has not ended are nobody's yet.
SELECT COALESCE(SUM(usable), 0) FROM tasks WHERE run = :run AND (cursor > :after OR cursor IS NULL);

-- name: consumers
SELECT run, consumer, cursor, unit FROM consumers;

-- name: save_consumer
INSERT INTO consumers (run, consumer, cursor, unit) VALUES (:run, :consumer, :cursor, :unit)
ON CONFLICT (run, consumer) DO UPDATE SET cursor = excluded.cursor, unit = excluded.unit;

-- name: tasks_ended_up_to
SELECT run, task_id FROM tasks WHERE cursor <= :cursor AND (callback IS NULL OR callback <> 'waiting')
ORDER BY cursor
LIMIT :limit;

-- name: task_sessions
SELECT session_id FROM work WHERE run = :run AND task_id = :task_id AND session_id IS NOT NULL;

-- name: keep_replaced
-- The task is run again: its sessions are no task's any more.
INSERT INTO replaced_sessions (session_id, cursor)
SELECT session_id, :cursor FROM work WHERE run = :run AND task_id = :task_id AND session_id IS NOT NULL
ON CONFLICT DO NOTHING;

-- name: replaced_up_to
SELECT session_id FROM replaced_sessions WHERE cursor <= :cursor ORDER BY cursor LIMIT :limit;

-- name: drop_replaced
DELETE FROM replaced_sessions WHERE session_id = :session_id;

-- name: drop_exchanges
DELETE FROM exchanges WHERE session_id = :session_id;

-- name: drop_session
DELETE FROM sessions WHERE session_id = :session_id;

-- name: drop_work
DELETE FROM work WHERE run = :run AND task_id = :task_id;

-- name: drop_task
DELETE FROM tasks WHERE run = :run AND task_id = :task_id;
