"""Style sheets and scripts, all served locally."""
