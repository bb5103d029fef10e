"""Small jobs as users of the frameworks write them, and the verdicts on them."""
