"""From parts to tables: frames → derive → tables → render. Imports neither tasks nor torch."""
