-- Records that a process has made so far, by its own count: stored, dropped and buffered ones.
-- NULL: unknown. The tail writes it when the rank's row changes, and once a minute while it grows.

ALTER TABLE ranks
    ADD COLUMN IF NOT EXISTS produced Nullable(UInt64);
