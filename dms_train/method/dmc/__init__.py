"""Dynamic Memory Compression: a token takes a slot of its own or is merged into the last one."""
