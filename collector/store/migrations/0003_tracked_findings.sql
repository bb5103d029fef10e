-- A finding is now a thing that begins and ends: analysed_ns is when it opened, position its number
-- in the run, first_step its onset; a later row of the same three replaces the one before.

ALTER TABLE findings
    ADD COLUMN IF NOT EXISTS epoch Int32 DEFAULT -1,
    ADD COLUMN IF NOT EXISTS checked_step Int32 DEFAULT -1,
    ADD COLUMN IF NOT EXISTS updated_ns Int64 DEFAULT analysed_ns,
    ADD COLUMN IF NOT EXISTS closed_ns Nullable(Int64);
