-- The proof of a finding that closed, which the next reports of a live run no longer have.

ALTER TABLE findings
    ADD COLUMN IF NOT EXISTS card String
        COMMENT 'JSON of the quantity that proves it, beside that of peers, once it has closed; empty: unknown';
