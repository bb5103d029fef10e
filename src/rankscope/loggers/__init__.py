"""What rankscope finds, written into the experiment trackers that people look at."""
