-- What makes an older database a newer one: under `-- from: N` the statements that take version N to N + 1.

-- from: 1
ALTER TABLE sessions ADD COLUMN reason TEXT;
ALTER TABLE sessions ADD COLUMN turn_rewards TEXT;
ALTER TABLE exchanges DROP COLUMN role;
ALTER TABLE exchanges DROP COLUMN agent_id;
ALTER TABLE exchanges ADD COLUMN checksum BYTEA;
UPDATE polar_schema SET version = 2;
