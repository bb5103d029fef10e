"""Reader of the spans that rankscope's own tracer records."""
