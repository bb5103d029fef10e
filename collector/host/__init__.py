"""What a host and its devices read about themselves, once a second."""
