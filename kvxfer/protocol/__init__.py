"""How a transfer goes and how it ends, without I/O: messages, the two state machines, their tables and records."""
