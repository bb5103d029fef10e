-- What the memory of a device and the FLOPs of an attention with windows need; -1: unknown.

ALTER TABLE steps
    ADD COLUMN IF NOT EXISTS peak_reserved_bytes Int64 DEFAULT -1
        COMMENT 'Peak of what the device allocator reserved so far, with its cache, in bytes; -1: unknown' CODEC(ZSTD(1));

ALTER TABLE steps
    ADD COLUMN IF NOT EXISTS num_alloc_retries Int64 DEFAULT -1
        COMMENT 'Times so far that the device allocator freed its cache because the memory was full; -1: unknown' CODEC(ZSTD(1));

ALTER TABLE microbatches
    ADD COLUMN IF NOT EXISTS sum_windowed_lengths Int64 DEFAULT -1
        COMMENT 'Sum over its sequences of the length times the length or the window of the attention, whichever is less; -1: unknown, or no window' CODEC(ZSTD(1));

ALTER TABLE ranks
    ADD COLUMN IF NOT EXISTS memory String DEFAULT ''
        COMMENT 'JSON of what the memory of its device holds: device_bytes, other_bytes (used outside of the allocator), parameter_bytes, gradient_bytes, optimizer_bytes; empty: unknown' CODEC(ZSTD(1));
