"""The suite that a kind of memory must pass, and the faults that it must find. The suite needs pytest."""
