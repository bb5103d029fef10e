"""The proof of each finding: the guilty quantity beside that of peers."""
