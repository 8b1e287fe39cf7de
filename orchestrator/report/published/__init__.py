"""Numbers that others published of the same cells, transcribed as data: one file a write-up, in `writeups`.

    writeups/*.toml ─schema→ Writeup ─records→ [Number] ─doubts→ what contradicts the hardware or itself ─matching→ beside ours

A further write-up is a file; a further device is an entry of devices.toml.
"""
