"""What a source of spans must provide: tables, context, devices."""
