"""How transfers proceed and end, without I/O: the messages, the two state machines, their tables and records."""
