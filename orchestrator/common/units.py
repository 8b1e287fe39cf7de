"""Binary units of memory."""

GIB, MIB = 1024**3, 1024**2
