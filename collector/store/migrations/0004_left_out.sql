-- What a rank left out of a step by request: bit k for spans of kind k (tracer.span.KINDS). Rows of
-- before, and of other formats, left out nothing that they would have held.

ALTER TABLE steps
    ADD COLUMN IF NOT EXISTS left_out UInt32 DEFAULT 0;
