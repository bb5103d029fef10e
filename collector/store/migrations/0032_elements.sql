-- How large a micro-batch without tokens is: images, sounds, features; -1: unknown.

ALTER TABLE microbatches
    ADD COLUMN IF NOT EXISTS num_elements Int64 DEFAULT -1
        COMMENT 'Elements of the tensors that the model got, if it got no tokens or their number is unknown; else -1' CODEC(ZSTD(1));
