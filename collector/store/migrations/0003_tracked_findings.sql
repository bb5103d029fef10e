-- A finding now opens and closes: analysed_ns is the time at which it opened, position its number in
-- the run, first_step its onset. A later row with the same three values replaces the earlier one.

ALTER TABLE findings
    ADD COLUMN IF NOT EXISTS epoch Int32 DEFAULT -1,
    ADD COLUMN IF NOT EXISTS checked_step Int32 DEFAULT -1,
    ADD COLUMN IF NOT EXISTS updated_ns Int64 DEFAULT analysed_ns,
    ADD COLUMN IF NOT EXISTS closed_ns Nullable(Int64);
