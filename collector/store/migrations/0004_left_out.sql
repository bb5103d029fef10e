-- Span kinds that a rank left out of a step by request: bit k for kind k of tracer.span.KINDS. Older
-- rows, and those of other formats, left out none.

ALTER TABLE steps
    ADD COLUMN IF NOT EXISTS left_out UInt32 DEFAULT 0;
