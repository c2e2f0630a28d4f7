"""Who says what to whom, and what must survive: no threads, clocks, sockets or files."""
