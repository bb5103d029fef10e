-- What a finding costs and how much it matters, so that both are known after a restart.

ALTER TABLE findings
    ADD COLUMN IF NOT EXISTS saved_s Nullable(Float64)
        COMMENT 'What fixing it would save in each of its steps, seconds; NULL: unknown',
    ADD COLUMN IF NOT EXISTS severity LowCardinality(String)
        COMMENT 'critical, warning or minor; empty: unknown';
ALTER TABLE findings
    MODIFY COMMENT 'Findings of all runs that were analysed, each once; read it with FINAL';
